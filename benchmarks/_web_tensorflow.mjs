// A contender of web.py: TensorFlow.js on its WebAssembly back end, which has no kernels for the gradients of convolutions
// by their kernels, nor for a depthwise convolution's: they are written here with the operators that it has.

import "@tensorflow/tfjs-backend-wasm";
import "@tensorflow/tfjs-core/dist/register_all_gradients.js";
import * as tf from "@tensorflow/tfjs-core";
import { setThreadsCount, setWasmPaths } from "@tensorflow/tfjs-backend-wasm";
import { answer, elementsOf } from "./_web_worker.mjs";

/** The part of a padded NHWC image that a kernel's element (row, column) meets. */
function met(padded, row, column, [, height, width], stride) {
  const end = [row + stride * (height - 1) + 1, column + stride * (width - 1) + 1];
  const [count, , , channels] = padded.shape;
  return tf.stridedSlice(padded, [0, row, column, 0], [count, ...end, channels], [1, stride, stride, 1]);
}

function forEach(kernel, act) {
  const [rows, columns] = kernel.shape;
  return Array.from({ length: rows * columns }, (_, place) => act(Math.floor(place / columns), place % columns));
}

/** Return x (NHWC) convolved with a kernel (height, width, in, out). */
function convolve(x, kernel, stride = 1) {
  const pad = (kernel.shape[0] - 1) / 2;
  const convolution = tf.customGrad((x, kernel, save) => {
    save([x, kernel]);
    const gradFunc = (dy, [x, kernel]) => [
      tf.conv2dTranspose(dy, kernel, x.shape, stride, pad),
      tf.tidy(() => {
        const padded = tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]]);
        const [, , channels, wide] = kernel.shape;
        const rows = tf.reshape(dy, [-1, wide]);
        const parts = forEach(kernel, (row, column) =>
          tf.matMul(tf.reshape(met(padded, row, column, dy.shape, stride), [-1, channels]), rows, true),
        );
        return tf.reshape(tf.stack(parts), kernel.shape);
      }),
    ];
    return { value: tf.conv2d(x, kernel, stride, pad), gradFunc };
  });
  return convolution(x, kernel);
}

/** Return x (NHWC) convolved with a kernel (height, width, channels, 1) for each channel, stride 1. */
function convolveDepthwise(x, kernel) {
  const pad = (kernel.shape[0] - 1) / 2;
  const convolution = tf.customGrad((x, kernel, save) => {
    save([x, kernel]);
    const gradFunc = (dy, [x, kernel]) => [
      tf.depthwiseConv2d(dy, tf.reverse(kernel, [0, 1]), 1, pad),
      tf.tidy(() => {
        const padded = tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]]);
        const parts = forEach(kernel, (row, column) =>
          tf.sum(tf.mul(met(padded, row, column, dy.shape, 1), dy), [0, 1, 2]),
        );
        return tf.reshape(tf.stack(parts), kernel.shape);
      }),
    ];
    return { value: tf.depthwiseConv2d(x, kernel, 1, pad), gradFunc };
  });
  return convolution(x, kernel);
}

const linear = (x, weight, bias) => tf.add(tf.matMul(x, weight, false, true), bias);
const toNhwc = (x) => tf.transpose(x, [0, 2, 3, 1]);
const flat = (x) => tf.reshape(tf.transpose(x, [0, 3, 1, 2]), [x.shape[0], -1]);
const hardSigmoid = (x) => tf.clipByValue(tf.add(tf.mul(x, 1 / 6), 0.5), 0, 1);
const hardSwish = (x) => tf.mul(x, hardSigmoid(x));

/** Batch normalization in training. Its running statistics change nothing of a training step, and are left out. */
function normalize(x, weight, bias) {
  const { mean, variance } = tf.moments(x, [0, 1, 2]);
  return tf.add(tf.mul(tf.mul(tf.sub(x, mean), tf.rsqrt(tf.add(variance, 1e-5))), weight), bias);
}

const MODELS = {
  mlp: (x, p) => {
    const first = tf.relu(linear(x, p["0.weight"], p["0.bias"]));
    return linear(tf.relu(linear(first, p["2.weight"], p["2.bias"])), p["4.weight"], p["4.bias"]);
  },
  mcmahan: (x, p) => {
    let z = toNhwc(x);
    for (const layer of [0, 3]) {
      z = tf.relu(tf.add(convolve(z, p[`${layer}.weight`]), p[`${layer}.bias`]));
      z = tf.maxPool(z, 2, 2, "valid");
    }
    return linear(tf.relu(linear(flat(z), p["7.weight"], p["7.bias"])), p["9.weight"], p["9.bias"]);
  },
  "inverted-residual": (x, p) => {
    const norm = (z, name) => normalize(z, p[`${name}.weight`], p[`${name}.bias`]);
    const y = hardSwish(norm(convolve(toNhwc(x), p["0.weight"], 2), "1"));
    const wide = hardSwish(norm(convolve(y, p["3.expand.0.weight"]), "3.expand.1"));
    const z = hardSwish(norm(convolveDepthwise(wide, p["3.depthwise.0.weight"]), "3.depthwise.1"));
    const mean = tf.mean(z, [1, 2], true);
    const squeezed = tf.relu(tf.add(convolve(mean, p["3.excite.1.weight"]), p["3.excite.1.bias"]));
    const excite = hardSigmoid(tf.add(convolve(squeezed, p["3.excite.3.weight"]), p["3.excite.3.bias"]));
    const projected = norm(convolve(tf.mul(z, excite), p["3.project.0.weight"]), "3.project.1");
    return linear(tf.mean(tf.add(y, projected), [1, 2]), p["6.weight"], p["6.bias"]);
  },
};

answer(async ({ model, engine, examples }, { manifest, parameters, batches }) => {
  const threads = Number(/[0-9]+/.exec(engine)?.[0] ?? 1);
  tf.env().set("WASM_HAS_MULTITHREAD_SUPPORT", threads > 1);
  setThreadsCount(threads);
  setWasmPaths(new URL("./", import.meta.url).href);
  await tf.setBackend("wasm");
  const variables = Object.fromEntries(
    manifest.parameters
      .filter((row) => !row.buffer)
      .map(({ name, shape, offset }) => {
        const values = tf.tensor(parameters.slice(offset, offset + elementsOf(shape)), shape);
        // PyTorch's kernels are (out, in, height, width); a depthwise one's in is 1.
        const order = name.includes("depthwise.0") ? [2, 3, 0, 1] : [2, 3, 1, 0];
        return [name, tf.variable(shape.length === 4 ? tf.transpose(values, order) : values)];
      }),
  );
  const ready = batches.map((batch) => {
    const [x, y] = manifest.batch;
    return [tf.tensor(batch[x.name], [examples, ...x.shape]), tf.oneHot(Int32Array.from(batch[y.name], Number), 10)];
  });
  return async (number, lr) => {
    const [x, y] = ready[number % ready.length];
    const loss = tf.tidy(() => {
      const { value, grads } = tf.variableGrads(() => tf.neg(tf.mean(tf.sum(tf.mul(y, tf.logSoftmax(MODELS[model](x, variables))), 1))));
      for (const [name, variable] of Object.entries(variables)) {
        const gradient = grads[variable.name];
        if (gradient === undefined) throw new Error(`${name} has no gradient`);
        variable.assign(tf.sub(variable, tf.mul(gradient, lr)));
      }
      return value;
    });
    const [value] = await loss.data();
    loss.dispose();
    return value;
  };
});
