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

// Call heard(runs) for each piece of news; a connection that is lost comes back by itself.
export function listen(heard, state) {
  const source = new EventSource("/api/events");
  source.onopen = () => state(true);
  source.onerror = () => state(false);
  source.onmessage = (event) => {
    const { runs } = JSON.parse(event.data);
    if (runs.length) heard(new Set(runs));
  };
}

export const link = (page, parts = [], params = {}) => {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== undefined && v !== null && v !== false));
  return `#/${[page, ...parts.map(encodeURIComponent)].join("/")}${[...query].length ? `?${query}` : ""}`;
};
