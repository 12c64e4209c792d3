/** One content by one GET: from one of its bytes to its last. No credential is sent, and no redirect is followed. */

/** Bytes that are handed on at a time, at least: each is one write to the store. */
const PART = 256 * 1024;
/** Bytes that come in each `patience` seconds of waiting for them, at least: a server that sends a byte now and then would
 * hold the device up for ever. */
const LEAST = 16 * 1024;

/** Yield the bytes of a content from `begin` up to `size`. The next are read when those before were taken. Throws Error,
 * whose text says why not all came; it does not have the URL. patience: seconds for an answer, and for the
 * next LEAST bytes. */
export async function* httpParts(
  url: string,
  begin: number,
  size: number,
  patience: number,
  signal: AbortSignal,
): AsyncGenerator<Uint8Array> {
  const where = new URL(url).hostname;
  const limit = new AbortController();
  const stop = (): void => limit.abort();
  signal.addEventListener("abort", stop);
  let timer: ReturnType<typeof setTimeout> | undefined;
  const patient = (): void => {
    clearTimeout(timer);
    timer = setTimeout(stop, 1000 * patience);
  };
  try {
    patient();
    const answer = await fetch(url, {
      headers: { Range: `bytes=${begin}-` },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
      signal: limit.signal,
    });
    check(answer, begin, size, where);
    const reader = answer.body!.getReader();
    let place = begin;
    let gathered: Uint8Array[] = [];
    let length = 0;
    let came = LEAST;
    while (place + length < size) {
      if (came >= LEAST) {
        patient();
        came = 0;
      }
      const { value, done } = await reader.read();
      if (done) break;
      came += value.length;
      if (place + length + value.length > size) throw new Error(`${where} sends more than the content's ${size} bytes`);
      gathered.push(value);
      length += value.length;
      if (length < PART && place + length < size) continue;
      clearTimeout(timer); // the store's time is not the server's
      yield joined(gathered, length);
      place += length;
      gathered = [];
      length = 0;
      came = LEAST;
    }
    if (length > 0) yield joined(gathered, length);
    if (place + length < size) throw new Error(`${where} ended the answer at byte ${place + length} of ${size}`);
  } catch (error) {
    if (limit.signal.aborted && !signal.aborted) throw new Error(`${where} sent too little for ${patience} s`);
    // A browser says no more of a server that cannot be reached, of a redirect, and of missing CORS headers.
    throw error instanceof TypeError ? new Error(`${where} cannot be read: ${error.message}`) : error;
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    limit.abort();
  }
}

/** Throw where an answer does not have the bytes that were asked for. */
function check(answer: Response, begin: number, size: number, where: string): void {
  if (answer.status !== 206 && (answer.status !== 200 || begin > 0)) {
    throw new Error(`${where} answers HTTP ${answer.status} to a range`);
  }
  // Another origin's server need not let a page see this header.
  const range = answer.headers.get("Content-Range");
  if (answer.status === 206 && range !== null && range !== `bytes ${begin}-${size - 1}/${size}`) {
    throw new Error(`${where} answers with the range ${range.slice(0, 100)}`);
  }
}

function joined(parts: readonly Uint8Array[], length: number): Uint8Array {
  const whole = new Uint8Array(length);
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}
