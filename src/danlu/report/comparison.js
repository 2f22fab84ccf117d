// Shows every run's value under the pointer. The page is complete without it.
for (const chart of document.querySelectorAll(".chart")) {
  const plot = chart.querySelector(".plot"), svg = chart.querySelector("svg"), tip = plot.querySelector(".tip");
  const { labels, answers } = JSON.parse(chart.querySelector(".points").textContent);
  const places = [...chart.querySelectorAll(".curve")].map((curve) =>
    [...(curve.getAttribute("d") || "").matchAll(/[ML]([\d.-]+) /g)].map((match) => +match[1]));

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const x = share * svg.viewBox.baseVal.width;
    plot.classList.add("live");
    plot.querySelector(".cross").style.left = `${share * 100}%`;
    tip.replaceChildren(...places.flatMap((xs, run) => {
      if (!xs.length) return [];
      const line = document.createElement("div"), value = document.createElement("b");
      const [position, text] = answers[run][nearest(xs, x)];
      value.textContent = text;
      line.append(`${labels[run]} · ${position}`, value);
      return [line];
    }));
    tip.style.left = share < 0.6 ? `calc(${share * 100}% + 10px)` : "auto";
    tip.style.right = share < 0.6 ? "auto" : `calc(${(1 - share) * 100}% + 10px)`;
  });
  plot.addEventListener("pointerleave", () => plot.classList.remove("live"));
}
