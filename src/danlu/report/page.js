// Shows the step under the pointer in every chart. The page is complete without it.
const charts = [...document.querySelectorAll(".chart")].map((chart) => ({
  plot: chart.querySelector(".plot"),
  svg: chart.querySelector("svg"),
  answers: JSON.parse(chart.querySelector(".points").textContent),
  places: [...(chart.querySelector(".raw, .line").getAttribute("d") || "").matchAll(/([\d.-]+) ([\d.-]+)/g)].map((m) => [+m[1], +m[2]]),
}));

function show(chart, x) {
  const { plot, svg, answers, places } = chart;
  if (!places.length) return;
  let low = 0, high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle][0] < x) low = middle; else high = middle;
  }
  const nearest = Math.abs(places[low][0] - x) <= Math.abs(places[high][0] - x) ? low : high;
  const { width, height } = svg.viewBox.baseVal;
  const left = places[nearest][0] / width, top = places[nearest][1] / height;
  plot.classList.add("live");
  plot.querySelector(".cross").style.left = plot.querySelector(".dot").style.left = `${left * 100}%`;
  plot.querySelector(".dot").style.top = `${top * 100}%`;
  const tip = plot.querySelector(".tip");
  tip.innerHTML = `step ${answers[nearest][0].toLocaleString("en")} · <b>${answers[nearest][1]}</b>`;
  tip.style.left = left < 0.6 ? `calc(${left * 100}% + 10px)` : "auto";
  tip.style.right = left < 0.6 ? "auto" : `calc(${(1 - left) * 100}% + 10px)`;
}

for (const { plot, svg } of charts) {
  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    charts.forEach((chart) => show(chart, ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width));
  });
  plot.addEventListener("pointerleave", () => charts.forEach((chart) => chart.plot.classList.remove("live")));
}
