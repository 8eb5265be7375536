"use strict";
const list = document.getElementById("layers");
const layers = Array.from(list.children);
const search = document.getElementById("search");
const kind = document.getElementById("kind");
const sort = document.getElementById("sort");

// The number that a layer is sorted by; what is not known comes last.
function number(layer, key) {
  const text = layer.dataset[key];
  return text === undefined ? Infinity : Number(text);
}

function update() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const layer of layers) {
    const text = layer.querySelector("summary").textContent.toLowerCase();
    const tags = layer.dataset.tags.split(" ");
    const wanted = words.every((word) => text.includes(word)) && (kind.value === "all" || tags.includes(kind.value));
    layer.hidden = !wanted;
    shown += wanted ? 1 : 0;
  }
  // In these orders the smallest number comes first; in all others the largest.
  const rising = sort.value === "order" || sort.value === "sqnr";
  const key = (layer) => (rising ? number(layer, sort.value) : -number(layer, sort.value));
  const worth = (layer) => (Number.isFinite(key(layer)) ? key(layer) : Infinity);
  const sorted = layers.slice().sort((a, b) => worth(a) - worth(b) || number(a, "order") - number(b, "order"));
  list.append(...sorted);
  document.getElementById("shown").textContent = `${shown} of ${layers.length} layers`;
}

// The part of the address behind # is either a layer, or a view such as #search=conv&sort=share.
function follow() {
  const layer = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const view = new URLSearchParams(location.hash.slice(1));
  for (const control of [search, kind, sort]) {
    if (view.has(control.id)) control.value = view.get(control.id);
  }
  if (layer && layer.hidden) [search.value, kind.value] = ["", "all"];
  update();
  if (layer && layer.tagName === "DETAILS") {
    layer.open = true;
    layer.scrollIntoView({ block: "start" });
  }
}

for (const control of [search, kind, sort]) control.addEventListener("input", update);
for (const [id, open] of [["open", true], ["close", false]]) {
  document.getElementById(id).addEventListener("click", () => {
    for (const layer of layers) if (!layer.hidden) layer.open = open;
  });
}
window.addEventListener("hashchange", follow);
follow();
document.body.dataset.ready = "yes";
