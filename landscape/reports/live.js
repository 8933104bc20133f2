"use strict";
(() => { // The page of landscape watch asks for its data again and again
const { every } = JSON.parse(document.getElementById("data").textContent);
async function refresh() {
  if (document.documentElement.dataset.ready) {
    let next;
    try { next = await (await fetch("data")).json(); } catch {
      document.getElementById("ran").textContent += " (landscape watch has ended)";
      return;
    }
    if (!await takeData(next)) { location.reload(); return; }
  }
  setTimeout(refresh, 1000 * every);
}
refresh();
})();
