// The training step of a bundle on onnxruntime-android (and on onnxruntime for the JVM, whose API is the same).
// docs/start/phones.md says what is around it. tests/device_sdk/test_phones.py compiles it and compares its numbers.

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import org.json.JSONArray
import org.json.JSONObject

/** A row of the manifest's table of parameters or of states: where a tensor stands in the flat vector, in elements. */
class Row(json: JSONObject) {
    val name: String = json.getString("name")
    val shape = LongArray(json.getJSONArray("shape").length()) { json.getJSONArray("shape").getLong(it) }
    val offset = json.getInt("offset")
    val size = shape.fold(1L, Long::times).toInt()
    val personal = json.optBoolean("personal", false)
}

/** What of manifest.json the step needs. */
class Manifest(json: JSONObject) {
    val parameters = json.getJSONArray("parameters").objects().map(::Row)
    val state = json.optJSONArray("state").objects().map(::Row)
    /** What travels to the coordinator: all parameters but the personal ones, which are the last. */
    val travelling = parameters.filter { !it.personal }
    val size = travelling.sumOf { it.size }
    val hyper = json.getJSONArray("hyper").objects().map { it.getString("name") }
    val metrics = json.getJSONArray("metrics").strings()
    /** Of `anchor`, `correction`, `previous`: the vectors that the step reads beside the model. */
    val references = json.optJSONArray("references").strings()
    val random = json.optBoolean("random", false)
}

/** A vector in memory that ONNX Runtime reads and writes in place. */
fun vector(size: Int): FloatBuffer = bytes(4 * size).asFloatBuffer()

private fun bytes(size: Int): ByteBuffer = ByteBuffer.allocateDirect(size).order(ByteOrder.nativeOrder())

/** Steps of graphs/train.onnx in an unpacked bundle. Parameters and state stay in two buffers: a step reads one of them and
 * writes the other, and they change places. */
class TrainingStep(bundle: File, threads: Int = 1) : AutoCloseable {
    val manifest = Manifest(JSONObject(File(bundle, "manifest.json").readText()))
    /** The loss and the metrics of the last step: means over its batch, measured before it. */
    val results = sortedMapOf<String, Float>()
    private val environment: OrtEnvironment = OrtEnvironment.getEnvironment().apply { setTelemetry(false) }
    // Given a path, the runtime finds graphs/frozen.safetensors beside the graph by itself.
    private val session: OrtSession = OrtSession.SessionOptions().use { options ->
        options.setIntraOpNumThreads(threads)
        options.setMemoryPatternOptimization(false) // half the memory at the same speed
        environment.createSession(File(bundle, "graphs/train.onnx").path, options)
    }
    private var now = Buffer()
    private var next = Buffer()
    private val references = manifest.references.associateWith { vector(manifest.size) }
    private val referenceTensors =
        references.flatMap { (name, values) -> tensors(name, values, manifest.travelling).toList() }.toMap()
    private val outputs = setOf("loss") + manifest.metrics.map { "metric.$it" }

    private inner class Buffer {
        val parameters = vector(manifest.parameters.sumOf { it.size })
        val state = vector(manifest.state.sumOf { it.size })
        val tensors = tensors("param", parameters, manifest.parameters) + tensors("state", state, manifest.state)
    }

    /**
     * Begin a task. `local`: the round's model and behind it the personal parameters; `state`: the initial state, its kept
     * rows as the last task left them. `anchor` and `previous` are the round's model where nothing else is given, and
     * `correction` is zeros.
     */
    fun load(local: FloatBuffer, state: FloatBuffer, given: Map<String, FloatBuffer> = emptyMap()) {
        now.parameters.rewound().put(local.rewound())
        now.state.rewound().put(state.rewound())
        for ((name, values) in references) {
            val zeros = FloatBuffer.allocate(manifest.size)
            val model = local.rewound().limit(manifest.size) as FloatBuffer
            values.rewound().put(given[name]?.rewound() ?: if (name == "correction") zeros else model)
        }
    }

    /**
     * Do one step. `batch`: the manifest's arrays by name, the first axis the examples'. `seed`: (task.seed + number of the
     * step) modulo 2^53. `hyper`: a value for each hyper-parameter: the task's, or the manifest's default.
     */
    fun step(batch: Map<String, OnnxTensor>, seed: Long, hyper: Map<String, Float>): Float {
        val scalars = manifest.hyper.associate { "hyper.$it" to scalar(hyper.getValue(it)) }.toMutableMap()
        if (manifest.random) scalars["seed"] = OnnxTensor.createTensor(environment, seed)
        val inputs = now.tensors + referenceTensors + scalars + batch.mapKeys { "batch.${it.key}" }
        session.run(inputs, outputs, next.tensors.mapKeys { "next.${it.key}" }).use { found ->
            for (name in outputs) results[name] = (found.get(name).get() as OnnxTensor).floatBuffer.get(0)
        }
        scalars.values.forEach(OnnxTensor::close)
        now = next.also { next = now }
        return results.getValue("loss")
    }

    /** A copy of the parameters, the personal ones last; the update is their first `manifest.size` less the round's model. */
    fun local(): FloatArray = FloatArray(now.parameters.capacity()).also { now.parameters.rewound().get(it) }

    fun state(): FloatArray = FloatArray(now.state.capacity()).also { now.state.rewound().get(it) }

    /** A batch's float32 array. Other dtypes likewise: LongBuffer for int64, IntBuffer for int32. */
    fun floats(values: FloatArray, vararg shape: Long): OnnxTensor {
        val buffer = vector(values.size).put(values).rewound()
        return OnnxTensor.createTensor(environment, buffer, shape)
    }

    fun longs(values: LongArray, vararg shape: Long): OnnxTensor {
        val buffer = bytes(8 * values.size).asLongBuffer().put(values)
        buffer.rewind()
        return OnnxTensor.createTensor(environment, buffer, shape)
    }

    /** A batch's uint8 or bool array. */
    fun bytes(values: ByteArray, type: OnnxJavaType, vararg shape: Long): OnnxTensor {
        val buffer = bytes(values.size).put(values)
        buffer.rewind()
        return OnnxTensor.createTensor(environment, buffer, shape, type)
    }

    private fun scalar(value: Float) = floats(floatArrayOf(value))

    /** The tensors of a vector by the graph's names: views into it, which are not copied. */
    private fun tensors(prefix: String, values: FloatBuffer, rows: List<Row>): Map<String, OnnxTensor> = rows.associate {
        val part = values.rewound().position(it.offset).limit(it.offset + it.size) as FloatBuffer
        "$prefix.${it.name}" to OnnxTensor.createTensor(environment, part.slice(), it.shape)
    }

    override fun close() {
        (now.tensors.values + next.tensors.values + referenceTensors.values).forEach(OnnxTensor::close)
        session.close()
    }
}

/** The whole buffer, from its beginning, without moving the buffer itself. */
private fun FloatBuffer.rewound(): FloatBuffer = duplicate().apply { clear() }

private fun JSONArray?.objects() = List(this?.length() ?: 0) { this!!.getJSONObject(it) }

private fun JSONArray?.strings() = List(this?.length() ?: 0) { this!!.getString(it) }
