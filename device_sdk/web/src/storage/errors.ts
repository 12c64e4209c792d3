/** What a store cannot do. */

/** The store cannot keep what it was given. `full`: there is no room. `refused`: the browser gives the page no store.
 * `lost`: the store was deleted, or taken over by another tab. */
export class StoreError extends Error {
  override name = "StoreError";
  readonly reason: "full" | "refused" | "lost" | "failed";

  constructor(text: string, reason: StoreError["reason"] = "failed") {
    super(text);
    this.reason = reason;
  }
}
