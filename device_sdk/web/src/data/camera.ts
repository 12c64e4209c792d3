/** Images from the camera. It is asked for only when `openCamera` is called, and off again after `stop`. */

import { SourceError } from "./errors.ts";
import type { Example, Tensor } from "./examples.ts";
import { drawer } from "./images.ts";
import { classOf, type Label, type Names } from "./labels.ts";
import { checkedShape, type ImageShape } from "./pixels.ts";

export interface CameraOptions extends ImageShape {
  readonly names?: Names;
  /** The classes' names in the model's order, where labels are names. */
  readonly classes?: readonly string[];
  /** Which camera: `environment` (default) looks away from the person, `user` at the person. */
  readonly facing?: "environment" | "user";
  /** The element that shows the camera's picture to the person. Left out: none does. */
  readonly video?: HTMLVideoElement;
}

export interface FrameOptions {
  /** How many frames. */
  readonly count: number;
  /** Milliseconds between two. Default: 200. */
  readonly every?: number;
  readonly label?: Label;
}

/** Ask the person for the camera, and start it. Only in a page, not in a worker. Rejects with SourceError. */
export async function openCamera(options: CameraOptions): Promise<Camera> {
  const shape = checkedShape(options);
  if (navigator.mediaDevices === undefined) {
    throw new SourceError("a page gets the camera only over HTTPS, or from this machine");
  }
  const facingMode = options.facing ?? "environment";
  let stream: MediaStream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: false, video: { facingMode } });
  } catch (error) {
    throw new SourceError(refusal(error as DOMException));
  }
  try {
    const video = options.video ?? document.createElement("video");
    video.muted = video.playsInline = true; // otherwise phones play it in full screen, or not at all
    video.srcObject = stream;
    await video.play();
    return new Camera(video, stream, shape, options);
  } catch (error) {
    for (const track of stream.getTracks()) track.stop();
    throw new SourceError(`the camera gives no picture (${(error as Error).message})`);
  }
}

/** A camera that is on. */
export class Camera {
  readonly #video: HTMLVideoElement;
  readonly #stream: MediaStream;
  readonly #draw: (image: CanvasImageSource, width: number, height: number) => Tensor;
  readonly #options: CameraOptions;

  constructor(video: HTMLVideoElement, stream: MediaStream, shape: Required<ImageShape>, options: CameraOptions) {
    this.#video = video;
    this.#stream = stream;
    this.#draw = drawer(shape);
    this.#options = options;
  }

  /** Whether the camera gives pictures: not after `stop`, nor where the person or the system took it away. */
  get on(): boolean {
    return this.#stream.getVideoTracks().some((track) => track.readyState === "live");
  }

  /** Return what the camera sees now, with this label. Throws SourceError where the camera is off, and DataError. */
  take(label?: Label): Example {
    const { names: { input = "x", label: labelName = "y" } = {}, classes } = this.#options;
    const { videoWidth, videoHeight } = this.#video;
    if (!this.on || videoWidth === 0) throw new SourceError("the camera is off; open it again");
    const image = this.#draw(this.#video, videoWidth, videoHeight);
    return {
      [input]: image,
      ...(label !== undefined && { [labelName]: classOf(label, classes, "what the camera sees") }),
    };
  }

  /** Yield frames, one after the other. */
  async *frames({ count, every = 200, label }: FrameOptions): AsyncGenerator<Example> {
    for (let number = 0; number < count; number++) {
      if (number > 0) await new Promise((resolve) => setTimeout(resolve, every));
      yield this.take(label);
    }
  }

  /** Turn the camera off. */
  stop(): void {
    for (const track of this.#stream.getTracks()) track.stop();
    if (this.#video.srcObject === this.#stream) this.#video.srcObject = null;
  }
}

function refusal({ name, message }: DOMException): string {
  if (name === "NotAllowedError")
    return "the camera was not allowed; it can be, in the browser's settings of this page";
  if (name === "NotFoundError") return "there is no camera";
  if (name === "NotReadableError") return "the camera is in use by another program";
  return `the camera cannot be had (${name}: ${message})`;
}
