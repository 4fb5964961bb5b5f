(() => {
  const svg = document.querySelector("svg");
  const line = svg.querySelector(".here");
  const readout = document.querySelector(".readout");

  const bytes = (amount) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    for (; amount >= 1024 && unit + 1 < units.length; unit++) amount /= 1024;
    return `${unit ? amount.toFixed(2) : amount} ${units[unit]}`;
  };

  const time = (ns) => (chart.length >= 1e9 ? `${(ns / 1e9).toFixed(3)} s` : `${(ns / 1e6).toFixed(3)} ms`);

  // The last level that began by then.
  const levelAt = (ns) => {
    let low = 0, high = chart.at.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (chart.at[middle] <= ns) low = middle; else high = middle;
    }
    return chart.held[low];
  };

  const tell = (ns) => {
    const held = levelAt(ns);
    const phase = chart.phases.find(([, from, to]) => from <= ns && ns < to);
    // As they are stacked: the topmost first.
    const rows = chart.kinds
      .map(([name, plural], index) => [name, plural, held[index]])
      .filter(([, , amount]) => amount > 0)
      .reverse()
      .map(([name, plural, amount]) =>
        `<tr><th><i class="${name}"></i>${plural}</th><td>${bytes(amount)}</td></tr>`);
    const total = held.reduce((sum, amount) => sum + amount, 0);
    return `<b>${time(ns)}</b>${phase ? ` ${phase[0]}` : ""}<table>${rows.join("")}` +
      `<tr class="total"><th>total</th><td>${bytes(total)}</td></tr></table>`;
  };

  const show = (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const part = (place.x - chart.left) / (chart.right - chart.left);
    if (part < 0 || part > 1) return hide();
    line.setAttribute("x1", place.x);
    line.setAttribute("x2", place.x);
    line.setAttribute("visibility", "visible");
    readout.innerHTML = tell(part * chart.length);
    readout.hidden = false;
    // On the side of the pointer where there is room.
    const left = event.clientX - svg.getBoundingClientRect().left;
    const fits = part < 0.5;
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
