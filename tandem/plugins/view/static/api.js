// The server's answers, and its news.

export async function get(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params))
    for (const one of [value].flat()) if (one !== undefined && one !== "" && one !== null) query.append(key, one);
  const answer = await fetch(`/api/${name}?${query}`);
  const body = await answer.json().catch(() => ({ error: answer.statusText }));
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

// Call heard(runs) for each piece of news, one after the other. A page that nobody sees lets go of its connection,
// as a browser has six for all its pages, and has news of everything when it is seen again.
export function listen(heard, state) {
  const everything = { has: () => true };
  let source = null, opened = false, busy = false, waiting = null;
  async function tell(runs) {
    if (busy) { waiting = waiting ? everything : runs; return; }
    busy = true;
    try { await heard(runs); } catch { state(false); }
    busy = false;
    if (waiting) { const next = waiting; waiting = null; tell(next); }
  }
  function connect() {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource("/api/events");
    source.onopen = () => { state(true); if (opened) tell(everything); opened = true; };
    source.onerror = () => state(false);
    source.onmessage = (event) => {
      const { runs } = JSON.parse(event.data);
      if (runs.length) tell(new Set(runs));
    };
  }
  document.addEventListener("visibilitychange", connect);
  connect();
}

export const link = (page, parts = [], params = {}) => {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== undefined && v !== null && v !== false));
  return `#/${[page, ...parts.map(encodeURIComponent)].join("/")}${[...query].length ? `?${query}` : ""}`;
};
