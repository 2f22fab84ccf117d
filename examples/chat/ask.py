"""Ask a model in the format of Hugging Face: python ask.py FOLDER QUESTION…"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, *questions: str) -> None:
    """Print every question with the most likely answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for question in questions:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**prompt, max_new_tokens=30, do_sample=False)
        answer = output[0, prompt["input_ids"].shape[1] :]
        print(f"{question} {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
