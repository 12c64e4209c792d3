/** One tab or worker at a time works with a store: Web Locks. */

import { StoreError } from "./errors.ts";

/** How a store is claimed. */
export interface Claim {
  /** Take it from whoever has it. */
  readonly steal?: boolean;
  /** Ends the waiting. */
  readonly signal?: AbortSignal;
  /** Somebody else has it, so the claim waits. */
  readonly waits?: () => void;
  /** It was taken, or is gone. Called at most once, after the claim. */
  readonly lost?: (error: StoreError) => void;
}

/** Wait until nobody else holds the lock of this name. Returns a function that gives it back. Where the browser has no
 * locks (a page without TLS), nobody waits. */
export function claimLock(name: string, { steal = false, signal, waits, lost }: Claim): Promise<() => void> {
  const locks = globalThis.navigator?.locks;
  if (locks === undefined) return Promise.resolve(() => {});
  return new Promise((resolve, reject) => {
    let taken = false;
    const ask = (options: LockOptions): Promise<unknown> =>
      locks.request(name, options, (lock) => {
        if (lock === null) return undefined;
        taken = true;
        return new Promise<void>((release) => {
          resolve(release);
        });
      });
    const asked = async (): Promise<void> => {
      if (steal) await ask({ steal: true });
      else await ask({ ifAvailable: true });
      if (taken) return;
      waits?.();
      await ask(signal === undefined ? {} : { signal });
    };
    asked().catch((error: unknown) => {
      if (taken) lost?.(new StoreError("another tab erased this device, or took it over", "lost"));
      else reject(error);
    });
  });
}
