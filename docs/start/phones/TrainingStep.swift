// The training step of a bundle on onnxruntime-objc (Swift package: onnxruntime-swift-package-manager).
// docs/start/phones.md says what is around it. NOT COMPILED: there was no Swift compiler where it was written. Its calls are those
// of objectivec/include/ort_*.h and of that package's own tests; tests/device_sdk/test_phones.py compares names and fields.

import Foundation
import OnnxRuntimeBindings  // with CocoaPods: the headers of onnxruntime-objc in a bridging header

/// A row of the manifest's table of parameters or of states: where a tensor stands in the flat vector, in elements.
struct Row: Decodable {
    let name: String
    let shape: [Int]
    let offset: Int
    let personal: Bool?

    var size: Int { shape.reduce(1, *) }
}

struct Hyper: Decodable {
    let name: String
}

/// What of manifest.json the step needs.
struct Manifest: Decodable {
    let parameters: [Row]
    let state: [Row]?
    let hyper: [Hyper]
    let metrics: [String]
    /// Of `anchor`, `correction`, `previous`: the vectors that the step reads beside the model.
    let references: [String]?
    let random: Bool?

    /// What travels to the coordinator: all parameters but the personal ones, which are the last.
    var travelling: [Row] { parameters.filter { $0.personal != true } }
    var size: Int { travelling.reduce(0) { $0 + $1.size } }
}

/// A tensor and its memory, which ONNX Runtime reads and writes in place.
struct Tensor {
    let memory: NSMutableData
    let value: ORTValue

    init(_ type: ORTTensorElementDataType, bytes: Int, shape: [Int]) throws {
        memory = NSMutableData(length: bytes)!
        value = try ORTValue(tensorData: memory, elementType: type, shape: shape.map { NSNumber(value: $0) })
    }

    init(_ scalar: Float) throws {
        try self.init(.float, bytes: 4, shape: [])
        floats[0] = scalar
    }

    init(_ scalar: Int64) throws {
        try self.init(.int64, bytes: 8, shape: [])
        memory.mutableBytes.assumingMemoryBound(to: Int64.self)[0] = scalar
    }

    var floats: UnsafeMutablePointer<Float> { memory.mutableBytes.assumingMemoryBound(to: Float.self) }
}

/// Steps of graphs/train.onnx in an unpacked bundle. Parameters and state stay in two sets of tensors: a step reads one of
/// them and writes the other, and they change places.
final class TrainingStep {
    let manifest: Manifest
    private let environment: ORTEnv
    private let session: ORTSession
    private var now: [String: Tensor]
    private var next: [String: Tensor]
    private var references: [String: Tensor] = [:]
    private var results: [String: Tensor] = [:]

    init(bundle: URL, threads: Int32 = 1) throws {
        let content = try Data(contentsOf: bundle.appendingPathComponent("manifest.json"))
        manifest = try JSONDecoder().decode(Manifest.self, from: content)
        environment = try ORTEnv(loggingLevel: .warning)
        let options = try ORTSessionOptions()
        try options.setIntraOpNumThreads(threads)
        // Given a path, the runtime finds graphs/frozen.safetensors beside the graph by itself.
        let graph = bundle.appendingPathComponent("graphs/train.onnx").path
        session = try ORTSession(env: environment, modelPath: graph, sessionOptions: options)
        now = try Self.carried(manifest)
        next = try Self.carried(manifest)
        for reference in manifest.references ?? [] {
            references.merge(try Self.tensors(reference, manifest.travelling)) { $1 }
        }
        for name in ["loss"] + manifest.metrics.map({ "metric.\($0)" }) { results[name] = try Tensor(Float(0)) }
    }

    private static func carried(_ manifest: Manifest) throws -> [String: Tensor] {
        try tensors("param", manifest.parameters).merging(try tensors("state", manifest.state ?? [])) { $1 }
    }

    private static func tensors(_ prefix: String, _ rows: [Row]) throws -> [String: Tensor] {
        try rows.reduce(into: [:]) { $0["\(prefix).\($1.name)"] = try Tensor(.float, bytes: 4 * $1.size, shape: $1.shape) }
    }

    /// Begin a task. `local`: the round's model and behind it the personal parameters; `state`: the initial state, its kept
    /// rows as the last task left them. `anchor` and `previous` are the round's model where nothing else is given, and
    /// `correction` is zeros.
    func load(local: [Float], state: [Float], given: [String: [Float]] = [:]) {
        scatter(local, "param", manifest.parameters, into: now)
        scatter(state, "state", manifest.state ?? [], into: now)
        for reference in manifest.references ?? [] {
            let zeros = [Float](repeating: 0, count: manifest.size)
            let values = given[reference] ?? (reference == "correction" ? zeros : local)
            scatter(values, reference, manifest.travelling, into: references)
        }
    }

    /// Do one step. `batch`: the manifest's arrays by name, the first axis the examples'. `seed`: (task.seed + number of the
    /// step) modulo 2^53. `hyper`: a value for each hyper-parameter: the task's, or the manifest's default.
    func step(batch: [String: Tensor], seed: Int64, hyper: [String: Float]) throws -> Float {
        var inputs = now.merging(references) { $1 }
        for (name, array) in batch { inputs["batch.\(name)"] = array }
        for row in manifest.hyper { inputs["hyper.\(row.name)"] = try Tensor(hyper[row.name]!) }
        if manifest.random == true { inputs["seed"] = try Tensor(seed) }
        var outputs = results
        for (name, tensor) in next { outputs["next.\(name)"] = tensor }
        try session.run(
            withInputs: inputs.mapValues { $0.value }, outputs: outputs.mapValues { $0.value }, runOptions: nil)
        swap(&now, &next)
        return results["loss"]!.floats[0]
    }

    /// The metrics of the last step: means over its batch, measured before it.
    func metric(_ name: String) -> Float { results["metric.\(name)"]!.floats[0] }

    /// A copy of the parameters, the personal ones last; the update is their first `manifest.size` less the round's model.
    func local() -> [Float] { gather("param", manifest.parameters) }

    func state() -> [Float] { gather("state", manifest.state ?? []) }

    private func gather(_ prefix: String, _ rows: [Row]) -> [Float] {
        rows.flatMap { Array(UnsafeBufferPointer(start: now["\(prefix).\($0.name)"]!.floats, count: $0.size)) }
    }

    private func scatter(_ vector: [Float], _ prefix: String, _ rows: [Row], into tensors: [String: Tensor]) {
        vector.withUnsafeBufferPointer { values in
            for row in rows {
                tensors["\(prefix).\(row.name)"]!.floats.update(from: values.baseAddress! + row.offset, count: row.size)
            }
        }
    }
}
