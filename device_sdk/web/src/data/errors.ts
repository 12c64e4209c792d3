/** The browser, or the person, does not give what a source of data needs. The text says what to do. */
export class SourceError extends Error {
  override name = "SourceError";
}
