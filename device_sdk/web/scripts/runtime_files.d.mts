/** Files of onnxruntime-web's dist/ that a page serves beside its script. */
export declare const RUNTIME_FILES: readonly string[];
/** More of them, fetched by devices with a GPU alone. */
export declare const WEBGPU_FILES: readonly string[];
