// A list in which j and k move a mark, and Enter opens it.

export function rowKeys(list) {
  let place = -1;
  const rows = () => [...list().querySelectorAll("[data-row]")];
  const move = (by) => {
    const all = rows();
    if (!all.length) return;
    all[place]?.classList.remove("marked");
    place = Math.min(all.length - 1, Math.max(0, place + by));
    all[place].classList.add("marked");
    all[place].scrollIntoView({ block: "nearest" });
  };
  return {
    j: () => move(1),
    k: () => move(-1),
    enter: () => rows()[place]?.querySelector("a")?.click(),
    x: () => rows()[place]?.querySelector("input[type=checkbox]")?.click(),
  };
}
