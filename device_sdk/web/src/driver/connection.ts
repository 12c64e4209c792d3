/** One WebSocket to the coordinator, never waited for beyond a limit. */

import { PROTOCOL_NAME } from "../protocol/messages.ts";
import { turn } from "../training/trainer.ts";
import type { Timing } from "./timing.ts";

/** Bytes that may wait in the socket before more are given to it. */
const BUFFERED = 256 * 1024;
/** Seconds between two looks at the socket's buffer: no event says that it has room again. */
const LOOK = 0.01;
/** A page may close with 1000 and 3000 to 4999 alone; so 1002 travels as this code (PROTOCOL.md, section 8). */
const PROTOCOL_BROKEN = 4002;

export interface Listener {
  /** The handshake was accepted. */
  opened(): void;
  frame(content: string | Uint8Array): void;
  /** The connection is gone, or could not be opened. Called once, and nothing after it. */
  ended(reason: string): void;
}

export class Connection {
  readonly #socket: WebSocket;
  readonly #timing: Timing;
  readonly #listener: Listener;
  #ended = false;
  #limit: ReturnType<typeof setTimeout>;

  constructor(url: string, subprotocols: readonly string[], timing: Timing, listener: Listener) {
    this.#timing = timing;
    this.#listener = listener;
    this.#socket = new WebSocket(url, [PROTOCOL_NAME, ...subprotocols]);
    this.#socket.binaryType = "arraybuffer";
    this.#limit = setTimeout(() => this.#end("the connection took too long to open"), 1000 * timing.open);
    this.#socket.onopen = () => {
      clearTimeout(this.#limit);
      if (!this.#ended) listener.opened();
    };
    this.#socket.onmessage = ({ data }: MessageEvent<string | ArrayBuffer>) => {
      if (!this.#ended) listener.frame(typeof data === "string" ? data : new Uint8Array(data));
    };
    this.#socket.onclose = ({ code, reason }) => this.#end(`${code} ${reason}`.trim());
  }

  /** Send a text frame. What a connection that is gone does not take is lost. */
  say(frame: string): void {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(frame);
  }

  /** Send binary frames, as fast as the coordinator takes them, until `wanted` returns false. Returns whether all were
   * given to the socket. */
  async stream(frames: Iterable<Uint8Array<ArrayBuffer>>, wanted: () => boolean): Promise<boolean> {
    let turnBegan = performance.now();
    for (const frame of frames) {
      if (performance.now() - turnBegan > 10) {
        await turn();
        turnBegan = performance.now();
      }
      if (!(await this.#hasRoom(wanted))) return false;
      this.#socket.send(frame);
    }
    return true;
  }

  /** Close with this code. Where the closing handshake takes too long, the connection is left. */
  close(code: 1000 | 1002): void {
    clearTimeout(this.#limit);
    this.#limit = setTimeout(() => this.#end("the closing handshake took too long"), 1000 * this.#timing.close);
    this.#socket.close(code === 1002 ? PROTOCOL_BROKEN : code);
  }

  /** Leave the connection at once; the browser ends it when it can. */
  leave(reason: string): void {
    this.#end(reason);
  }

  async #hasRoom(wanted: () => boolean): Promise<boolean> {
    let before = this.#socket.bufferedAmount;
    let since = performance.now();
    while (wanted() && this.#socket.readyState === WebSocket.OPEN) {
      const buffered = this.#socket.bufferedAmount;
      if (buffered <= BUFFERED) return true;
      if (buffered < before) since = performance.now();
      before = buffered;
      if (performance.now() - since > 1000 * this.#timing.send) {
        this.#end(`the coordinator took nothing for ${this.#timing.send} s`);
        return false;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * LOOK));
    }
    return false;
  }

  #end(reason: string): void {
    clearTimeout(this.#limit);
    if (this.#ended) return;
    this.#ended = true;
    this.#socket.close(1000);
    this.#listener.ended(reason);
  }
}
