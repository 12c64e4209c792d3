/** Why nothing more is computed. */

/** The owner asked to stop. The work is dropped. */
export class StoppedError extends Error {
  override name = "StoppedError";
}
