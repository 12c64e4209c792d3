import { describe, expect, test } from "vitest";
import { labelOf } from "../../src/data/images.ts";
import { classOf } from "../../src/data/labels.ts";
import { checkedShape, placement, tensorOf } from "../../src/data/pixels.ts";

const SQUARE = { width: 10, height: 10 };

test.each([
  ["crop", 40, 20, { from: [10, 0, 20, 20], to: [0, 0, 10, 10] }],
  ["crop", 20, 40, { from: [0, 10, 20, 20], to: [0, 0, 10, 10] }],
  ["pad", 40, 20, { from: [0, 0, 40, 20], to: [0, 2.5, 10, 5] }],
  ["pad", 5, 10, { from: [0, 0, 5, 10], to: [2.5, 0, 5, 10] }],
  ["stretch", 40, 20, { from: [0, 0, 40, 20], to: [0, 0, 10, 10] }],
  ["crop", 5, 5, { from: [0, 0, 5, 5], to: [0, 0, 10, 10] }],
] as const)("%s of %i x %i", (fit, width, height, expected) => {
  expect(placement(width, height, checkedShape({ ...SQUARE, fit }))).toEqual(expected);
});

const PIXELS = Uint8ClampedArray.of(255, 0, 0, 255, /**/ 0, 255, 0, 255);

test("colours are channels first, from 0 to 1, less the mean, over the deviation", () => {
  const two = { width: 2, height: 1 };
  expect(tensorOf(PIXELS, checkedShape(two))).toEqual({
    values: Float32Array.of(1, 0, 0, 1, 0, 0),
    shape: [3, 1, 2],
  });
  const shape = checkedShape({ ...two, mean: [0.5, 0, 1], std: [0.5, 2, 1] });
  expect([...tensorOf(PIXELS, shape).values]).toEqual([1, -1, 0, 0.5, -1, -1]);
  const grey = tensorOf(PIXELS, checkedShape({ ...two, channels: 1, mean: 0.1307, std: 0.3081 }));
  expect(grey.shape).toEqual([1, 1, 2]);
  [0.299, 0.587].forEach((value, place) => {
    expect(grey.values[place]).toBeCloseTo((value - 0.1307) / 0.3081, 6);
  });
});

test.each([
  [{ width: 0 }, "an image of 0 x 10 pixels cannot be made"],
  [{ mean: [0, 0] }, "mean is [0,0]; expected a number, or 3 of them"],
  [{ std: 0 }, "std is 0; expected a number above 0, or 3 of them"],
  [{ channels: 1, std: [1, 1, 1] }, "std is [1,1,1]; expected a number above 0, or 1 of them"],
] as const)("an image that cannot be made: %o", (change, words) => {
  expect(() => checkedShape({ ...SQUARE, ...change })).toThrow(words);
});

describe("labels", () => {
  const file = (name: string, path = ""): File => {
    const made = new File([], name);
    return Object.defineProperty(made, "webkitRelativePath", { value: path });
  };
  test("from a file's name, its folder, or a function", async () => {
    for (const name of ["cat_17.jpg", "cat-17.jpg", "cat.jpg"])
      expect(await labelOf(file(name), 0, "name")).toBe("cat");
    expect(await labelOf(file("17.jpg", "pets/cat/17.jpg"), 0, "folder")).toBe("cat");
    expect(await labelOf(file("a.jpg"), 3, async ({ name }, number) => `${name}${number}`)).toBe("a.jpg3");
    await expect(labelOf(file(".jpg"), 0, "name")).rejects.toThrow(
      ".jpg has no label in its name; expected a name such",
    );
    await expect(labelOf(file("a.jpg"), 0, "folder")).rejects.toThrow("expected files of a folder that was chosen");
  });
  test("are numbers, or names among the classes", () => {
    expect(classOf(3, undefined, "a")).toBe(3);
    expect(classOf("7", undefined, "a")).toBe(7);
    expect(classOf("7", ["5", "7"], "a")).toBe(1);
    expect(() => classOf("cat", undefined, "a.jpg")).toThrow("a.jpg has the label cat; expected a number, or classes");
    expect(() => classOf("cow", ["cat", "dog"], "a.jpg")).toThrow("a.jpg has the label cow; expected one of cat, dog");
  });
});
