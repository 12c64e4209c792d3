/** What the browser says of the network: whether there is one, and when there is another. */

interface Connection extends EventTarget {
  readonly type?: string;
  readonly saveData?: boolean;
  readonly metered?: boolean;
}

/** The Network Information API, which not all browsers have. */
export function connectionNow(): Connection | undefined {
  return (globalThis.navigator as { connection?: Connection } | undefined)?.connection;
}

/** Return whether the browser knows that there is no network at all. */
export function isOffline(): boolean {
  return globalThis.navigator?.onLine === false;
}

/** Call `back` whenever there is a network again, or one of another kind. Returns a function that ends this. */
export function onNetwork(back: () => void): () => void {
  if (globalThis.addEventListener === undefined) return () => {}; // Node
  const connection = connectionNow();
  let before = connection?.type;
  const changed = (): void => {
    // The event comes for another speed too.
    if (connection?.type !== before && connection?.type !== "none") back();
    before = connection?.type;
  };
  globalThis.addEventListener("online", back);
  connection?.addEventListener("change", changed);
  return () => {
    globalThis.removeEventListener("online", back);
    connection?.removeEventListener("change", changed);
  };
}
