(() => {
  const svg = document.querySelector("svg");
  const line = svg.querySelector(".here");
  const readout = document.querySelector(".readout");

  const formatBytes = (amount) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    for (; amount >= 1024 && unit + 1 < units.length; unit++) amount /= 1024;
    return `${unit ? amount.toFixed(2) : amount} ${units[unit]}`;
  };

  const formatTime = (ns) => (chart.length >= 1e9 ? `${(ns / 1e9).toFixed(3)} s` : `${(ns / 1e6).toFixed(3)} ms`);

  // The bytes by kind at a point in time: those of the last level that begins at or before it.
  const bytesAt = (ns) => {
    let low = 0, high = chart.at.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (chart.at[middle] <= ns) low = middle; else high = middle;
    }
    return chart.bytes[low];
  };

  const render = (ns) => {
    const bytes = bytesAt(ns);
    const phase = chart.phases.find(([, from, to]) => from <= ns && ns < to);
    // In the order of the stack: the topmost first.
    const rows = chart.kinds
      .map(([name, plural], index) => [name, plural, bytes[index]])
      .filter(([, , amount]) => amount > 0)
      .reverse()
      .map(([name, plural, amount]) =>
        `<tr><th><i class="${name}"></i>${plural}</th><td>${formatBytes(amount)}</td></tr>`);
    const total = bytes.reduce((sum, amount) => sum + amount, 0);
    return `<b>${formatTime(ns)}</b>${phase ? ` ${phase[0]}` : ""}<table>${rows.join("")}` +
      `<tr class="total"><th>total</th><td>${formatBytes(total)}</td></tr></table>`;
  };

  const show = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const fraction = (point.x - chart.left) / (chart.right - chart.left);
    if (fraction < 0 || fraction > 1) return hide();
    line.setAttribute("x1", point.x);
    line.setAttribute("x2", point.x);
    line.setAttribute("visibility", "visible");
    readout.innerHTML = render(fraction * chart.length);
    readout.hidden = false;
    // Show it on the side of the pointer that has room.
    const left = event.clientX - svg.getBoundingClientRect().left;
    const fits = fraction < 0.5;
    readout.style.left = fits ? `${left + 14}px` : "";
    readout.style.right = fits ? "" : `${svg.clientWidth - left + 14}px`;
  };

  const hide = () => {
    line.setAttribute("visibility", "hidden");
    readout.hidden = true;
  };

  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
})();
