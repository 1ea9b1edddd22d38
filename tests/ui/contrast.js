// Which texts of the page have too little contrast with what is behind them? By class, with the ratio.
() => {
  const LEAST = 4.5;
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const mixed = (colours) => {
    for (const colour of ["white", ...colours]) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, index) => sum + weight * linear(colour[index] / 255), 0);
  const found = {};
  for (const each of document.querySelectorAll("body *")) {
    const says = each.placeholder || [...each.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!says || !each.checkVisibility() || each.closest(".sr, .skip, title, noscript")) continue;
    const style = getComputedStyle(each, each.placeholder ? "::placeholder" : null);
    const behind = [];
    for (let up = each; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
    const front = each.ownerSVGElement ? style.fill : style.color;
    const [darker, lighter] = [mixed(behind), mixed([...behind, front])].map(luminance).sort((one, other) => one - other);
    const ratio = (lighter + 0.05) / (darker + 0.05);
    if (ratio < LEAST) found[`${each.tagName}.${each.getAttribute("class")}`] = Number(ratio.toFixed(2));
  }
  return found;
}
