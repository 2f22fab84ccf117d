"""Whether a Hugging Face folder has what loaders read: `transformers`, and vLLM, which reads the same files.

Known from vLLM's source: it takes `architectures`, dtype and positions from `config.json`, every `*.safetensors` that
the index names (all of them if there is no index), tensors by the names of the family, the tokenizer through
`AutoTokenizer`, and the tokens that end a text from the tokenizer and from `generation_config.json`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.framework.hf.config import CONFIG_FILE
from danlu.framework.hf.convert import HF_FILE_PREFIX, HFWeights, open_hf
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.tokenizer import GENERATION_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from danlu.spec.files import read_json
from danlu.spec.problem import SpecError
from danlu.storage.data.tokenizer import MAX_TOKENIZER_BYTES

CheckState = Literal["ok", "missing", "wrong", "note"]
_DTYPE_NAMES = {"float32": "torch.float32", "bfloat16": "torch.bfloat16", "float16": "torch.float16"}


@dataclass(frozen=True)
class LayoutCheck:
    """One thing that loaders read."""

    name: str
    state: CheckState
    """`missing` and `wrong` are for the user to fix; a `note` is neither good nor bad."""
    detail: str


def check_layout(folder: Path) -> list[LayoutCheck]:
    """Everything that a loader reads of a folder, and whether it is there and consistent."""
    try:
        config, _, weights = open_hf(folder)
    except SpecError as error:
        problem = error.problems[0]
        return [LayoutCheck("config and weights", "wrong", f"{problem.key}: {problem.message}")]
    return [*_config_checks(config, weights), *_weight_checks(folder, weights), *_TokenizerChecks(folder, config).run()]


def _config_checks(config: HFConfig, weights: HFWeights) -> Iterator[LayoutCheck]:
    values, family = config.values, weights.family
    named = values.get("architectures")
    right = named == [family.architecture]
    yield LayoutCheck(
        f"{CONFIG_FILE}: architectures",
        "ok" if right else "wrong" if named else "missing",
        family.architecture if right else f"is {named}, but must be [{family.architecture}]",
    )
    said = values.get("dtype", values.get("torch_dtype"))
    stored = {str(dtype) for dtype in weights.parameter_dtypes()}
    right = stored == {_DTYPE_NAMES.get(str(said), "")}
    yield LayoutCheck(
        f"{CONFIG_FILE}: dtype",
        "ok" if right else "wrong" if said else "missing",
        f"{said}, as in the files" if right else f"is {said}, but the files have {', '.join(sorted(stored))}",
    )
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", values.get("rope_theta"))
    kind = scaling.get("rope_type", "default")
    yield LayoutCheck(
        f"{CONFIG_FILE}: positions",
        "ok" if theta else "missing",
        f"rotary, theta {theta:g}, {kind}" if theta else "no rope_theta: the family's default would be taken",
    )


def _weight_checks(folder: Path, weights: HFWeights) -> Iterator[LayoutCheck]:
    files = {path.name for path in folder.glob("*.safetensors")}
    indexed = (folder / f"{HF_FILE_PREFIX}.safetensors.index.json").is_file()
    stray = sorted(files - weights.weights.file_names)
    yield LayoutCheck(
        "weights: files",
        "wrong" if stray else "ok",
        f"{stray[0]} is not one of the model's, and loaders may read it: remove it"
        if stray
        else f"{len(files)} safetensors{', with their index' if indexed else ''}",
    )
    # Names and shapes were compared when the folder was opened.
    yield LayoutCheck(
        "weights: names", "ok", f"{len(weights.weights.names)} tensors, all of the family's, none missing"
    )


class _TokenizerChecks:
    """The tokenizer's files, against each other and against the configuration."""

    def __init__(self, folder: Path, config: HFConfig) -> None:
        self.folder, self.config = folder, config
        self.content = self._read(TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
        self.settings = self._read(TOKENIZER_CONFIG_FILE)
        self.generation = self._read(GENERATION_FILE)
        self.ids = _ids(self.content) if isinstance(self.content, dict) else {}

    def run(self) -> Iterator[LayoutCheck]:
        """All checks."""
        checks: tuple[Callable[[], LayoutCheck], ...] = (
            self._tokenizer,
            self._settings,
            self._end_of_text,
            self._generation,
            self._special_tokens,
            self._added_tokens,
            self._chat_template,
        )
        return (check() for check in checks)

    def _read(self, name: str, limit: int = 1 << 20) -> Any:
        """The content of a file; None if it is missing, the reason if it cannot be read."""
        try:
            return read_json(self.folder / name, limit)
        except FileNotFoundError:
            return None
        except SpecError as error:
            return error.problems[0].message

    def _tokenizer(self) -> LayoutCheck:
        if self.content is None:
            return LayoutCheck(
                TOKENIZER_FILE, "missing", "no tool can turn text into tokens: add the tokenizer's files"
            )
        if not self.ids:
            why = self.content if isinstance(self.content, str) else "has no vocabulary"
            return LayoutCheck(TOKENIZER_FILE, "wrong", why)
        largest, rows = max(self.ids.values()), self.config.get("vocab_size")
        state: CheckState = "ok" if largest < rows else "wrong"
        return LayoutCheck(TOKENIZER_FILE, state, f"{len(self.ids):,} tokens, ids up to {largest:,} of {rows:,}")

    def _settings(self) -> LayoutCheck:
        if not isinstance(self.settings, dict):
            why = self.settings or "without it the tokenizer ends no text"
            return LayoutCheck(TOKENIZER_CONFIG_FILE, "wrong" if self.settings else "missing", why)
        name = _token_name(self.settings.get("eos_token"))
        if name not in self.ids:
            says = f"eos_token is {name}, which the tokenizer does not have" if name else "eos_token is missing"
            return LayoutCheck(TOKENIZER_CONFIG_FILE, "wrong" if name else "missing", says)
        return LayoutCheck(TOKENIZER_CONFIG_FILE, "ok", f"eos_token {name}, {self.settings.get('tokenizer_class')}")

    def _end_of_text(self) -> LayoutCheck:
        """The model and its tokenizer must agree on the token that ends a text: a server stops at it."""
        settings = self.settings if isinstance(self.settings, dict) else {}
        tokenizer = self.ids.get(_token_name(settings.get("eos_token")) or "")
        said = _as_list(self.config.values.get("eos_token_id"))
        title = f"{CONFIG_FILE}: eos_token_id"
        if not said:
            return LayoutCheck(title, "missing", "the family's default would be taken, which may be any token")
        if tokenizer is not None and tokenizer not in said:
            # Published chat models end a turn with another token than a document; both are listed for generation.
            listed = _as_list(self.generation.get("eos_token_id")) if isinstance(self.generation, dict) else []
            state: CheckState = "note" if tokenizer in listed else "wrong"
            return LayoutCheck(title, state, f"is {said}, but the tokenizer's is {tokenizer}")
        return LayoutCheck(
            title, "ok", f"{', '.join(map(str, said))}{', as the tokenizer says' if tokenizer is not None else ''}"
        )

    def _generation(self) -> LayoutCheck:
        if not isinstance(self.generation, dict):
            why = self.generation or "defaults are taken from config.json"
            return LayoutCheck(GENERATION_FILE, "wrong" if self.generation else "missing", why)
        said, model = (_as_list(values.get("eos_token_id")) for values in (self.generation, self.config.values))
        state: CheckState = "ok" if set(model) <= set(said) else "wrong"
        return LayoutCheck(GENERATION_FILE, state, f"ends a text at {', '.join(map(str, said)) or 'no token'}")

    def _special_tokens(self) -> LayoutCheck:
        if (self.folder / SPECIAL_TOKENS_FILE).is_file():
            return LayoutCheck(SPECIAL_TOKENS_FILE, "ok", "for versions of transformers before 5")
        return LayoutCheck(SPECIAL_TOKENS_FILE, "note", "none; only versions of transformers before 5 read it")

    def _added_tokens(self) -> LayoutCheck:
        """A tokenizer may put a token before every text that the training data does not have."""
        processor = self.content.get("post_processor") if isinstance(self.content, dict) else None
        if "TemplateProcessing" in str(processor):
            return LayoutCheck(
                "added tokens", "note", "the tokenizer adds special tokens to a text; `danlu data build` does not"
            )
        return LayoutCheck("added tokens", "ok", "none: a text has the tokens that it was trained on")

    def _chat_template(self) -> LayoutCheck:
        settings = self.settings if isinstance(self.settings, dict) else {}
        if "chat_template" in settings or list(self.folder.glob("chat_template*")):
            return LayoutCheck("chat template", "ok", "the tokenizer's own")
        return LayoutCheck("chat template", "note", "none: a base model; post-training on conversations brings one")


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Names and ids of all tokens in a `tokenizer.json`, whichever kind of model it has."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        found = {name: token for name, token in vocabulary.items() if isinstance(token, int)}
    elif isinstance(vocabulary, list):  # of a unigram model: pairs of name and score, in the order of their ids
        found = {str(pair[0]): token for token, pair in enumerate(vocabulary) if isinstance(pair, list) and pair}
    for added in tokenizer.get("added_tokens") or []:
        if isinstance(added, dict) and isinstance(added.get("id"), int):
            found[str(added.get("content"))] = added["id"]
    return found


def _token_name(value: Any) -> str | None:
    """A token as a text, or as the object that older versions write."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
