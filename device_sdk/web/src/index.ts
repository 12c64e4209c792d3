/** Federated learning in a browser tab: the fleetlearn device on stock ONNX Runtime. */

export { Camera, type CameraOptions, type FrameOptions, openCamera } from "./data/camera.ts";
export { SourceError } from "./data/errors.ts";
export { type Bounds, collectExamples, type Example, type Examples, type Tensor } from "./data/examples.ts";
export { type ImageOptions, imagesFromFiles } from "./data/images.ts";
export type { Label, Names } from "./data/labels.ts";
export { allowMotion, type MotionOptions, motionWindows, type Signal } from "./data/motion.ts";
export type { ImageShape } from "./data/pixels.ts";
export { type Text, type TextOptions, textTokens } from "./data/text.ts";
export { type WindowShape, Windows } from "./data/windows.ts";
export { Device, type DeviceOptions, type Stated } from "./device.ts";
export type { Log } from "./driver/driver.ts";
export type { Timing } from "./driver/timing.ts";
export { ScreenLock } from "./life/screen.ts";
export type { DeviceState, Phase } from "./life/state.ts";
export type { Conditions, Surroundings } from "./life/surroundings.ts";
export { BundleError, type Code, ProtocolError } from "./protocol/errors.ts";
export { type RemoteDevice, type RemoteOptions, startDevice } from "./remote.ts";
export type { RuntimeOptions } from "./runtimes/choose.ts";
export type { Column, Numbers } from "./runtimes/columns.ts";
export type { Claim } from "./storage/claim.ts";
export { StoreError } from "./storage/errors.ts";
export { keepStorage, openIndexedDb } from "./storage/indexed_db.ts";
export { eraseStore, MemoryStore, type Store } from "./storage/store.ts";
export type { Columns } from "./training/data.ts";
export { DataError, TrainingError } from "./training/errors.ts";
export { type OpenedRuntime, type OpenOptions, openRuntime } from "./training/open_runtime.ts";
export { openSharedModel, type SharedModel } from "./training/shared_model.ts";
