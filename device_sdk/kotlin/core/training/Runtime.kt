package fleetlearn.training

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtSession
import fleetlearn.protocol.BundleException
import fleetlearn.protocol.EVAL
import fleetlearn.protocol.Manifest
import fleetlearn.protocol.Row
import fleetlearn.protocol.TRAIN
import java.nio.FloatBuffer
import java.nio.file.Path

private val TYPES = mapOf(
    "float32" to OnnxJavaType.FLOAT, "float64" to OnnxJavaType.DOUBLE, "int64" to OnnxJavaType.INT64,
    "int32" to OnnxJavaType.INT32, "uint8" to OnnxJavaType.UINT8, "bool" to OnnxJavaType.BOOL,
)

/** A model measured on some examples, as sums. */
class Sums(val examples: Long, val loss: Double, val metrics: Map<String, Double>)

/**
 * The steps of graphs/train.onnx and the sums of graphs/eval.onnx in an unpacked bundle.
 *
 * Parameters and state stay in two buffers: a step reads one of them and writes the other, and they change places.
 * Throws BundleException where a graph cannot be loaded.
 */
class Runtime(folder: Path, val manifest: Manifest, threads: Int) : AutoCloseable {
    private val environment: OrtEnvironment = OrtEnvironment.getEnvironment().apply { setTelemetry(false) }
    private val train = session(folder, TRAIN, threads)
    private val evaluation = session(folder, EVAL, threads)
    private var now = Buffer()
    private var next = Buffer()
    private val references = manifest.references.associateWith { floats(manifest.size) }
    private val referenceTensors =
        references.flatMap { (name, values) -> tensors(name, values, manifest.travelling).toList() }.toMap()

    /** The metrics of the last step: means over its batch, measured before it. */
    var metrics: Map<String, Double> = emptyMap()
        private set

    private inner class Buffer {
        val parameters = floats(manifest.localSize.toInt())
        val state = floats(manifest.stateSize.toInt())
        val parameterTensors: Map<String, OnnxTensor> = tensors("param", parameters, manifest.parameters)
        val tensors: Map<String, OnnxTensor> = parameterTensors + tensors("state", state, manifest.state)
    }

    /** Begin a task: `model` travels, `personal` stays; `previous` is the round's model where nothing else is given. */
    fun load(model: FloatArray, personal: FloatArray, state: FloatArray, previous: FloatArray?) {
        now.parameters.whole().put(model).put(personal)
        now.state.whole().put(state)
        for ((name, values) in references) {
            val given = when (name) {
                "correction" -> FloatArray(manifest.size)
                "previous" -> previous ?: model
                else -> model
            }
            values.whole().put(given)
        }
    }

    /** Do one step and return its loss, measured before it. */
    fun step(batch: Batch, seed: Long, hyper: Map<String, Double>): Double {
        val scalars = hyper.entries.associate { (name, value) -> "hyper.$name" to scalar(value.toFloat()) }
            .toMutableMap()
        if (manifest.random) scalars["seed"] = OnnxTensor.createTensor(environment, seed)
        val arrays = arrays(batch)
        try {
            val inputs = now.tensors + referenceTensors + scalars + arrays
            val outputs = setOf("loss") + manifest.metrics.map { "metric.$it" }
            val found = run(train, inputs, outputs, next.tensors.mapKeys { "next.${it.key}" })
            now = next.also { next = now }
            metrics = manifest.metrics.associateWith { found.getValue("metric.$it") }
            return found.getValue("loss")
        } finally {
            (scalars.values + arrays.values).forEach(OnnxTensor::close)
        }
    }

    /** Return the sums over a batch. */
    fun evaluate(batch: Batch): Sums {
        val arrays = arrays(batch)
        try {
            val outputs = setOf("loss_sum", "examples") + manifest.metrics.map { "metric_sum.$it" }
            val found = run(evaluation, now.parameterTensors + arrays, outputs, emptyMap())
            val metrics = manifest.metrics.associateWith { found.getValue("metric_sum.$it") }
            return Sums(found.getValue("examples").toLong(), found.getValue("loss_sum"), metrics)
        } finally {
            arrays.values.forEach(OnnxTensor::close)
        }
    }

    /** Copies: the parameters, the personal ones last, and the state. */
    fun local(): FloatArray = FloatArray(now.parameters.capacity()).also { now.parameters.whole().get(it) }

    fun state(): FloatArray = FloatArray(now.state.capacity()).also { now.state.whole().get(it) }

    override fun close() {
        (now.tensors.values + next.tensors.values + referenceTensors.values).forEach(OnnxTensor::close)
        train.close()
        evaluation.close()
    }

    /** Given a path, the runtime finds graphs/frozen.safetensors beside the graph by itself. */
    private fun session(folder: Path, file: String, threads: Int): OrtSession =
        OrtSession.SessionOptions().use { options ->
        options.setIntraOpNumThreads(threads)
        options.setMemoryPatternOptimization(false) // half the memory at the same speed
        try {
            environment.createSession(folder.resolve(file).toString(), options)
        } catch (error: OrtException) {
            throw BundleException("bad-message", "onnxruntime cannot load $file: ${error.message}")
        }
    }

    private fun run(
        graph: OrtSession,
        inputs: Map<String, OnnxTensor>,
        scalars: Set<String>,
        outputs: Map<String, OnnxTensor>,
    ): Map<String, Double> = try {
        graph.run(inputs, scalars, outputs).use { found ->
            scalars.associateWith { number(found.get(it).get() as OnnxTensor) }
        }
    } catch (error: OrtException) {
        throw TrainingException("runtime-error", "onnxruntime: ${error.message}")
    }

    private fun number(tensor: OnnxTensor): Double = when (tensor.info.type) {
        OnnxJavaType.INT64 -> tensor.longBuffer.get(0).toDouble()
        OnnxJavaType.DOUBLE -> tensor.doubleBuffer.get(0)
        else -> tensor.floatBuffer.get(0).toDouble()
    }

    private fun arrays(batch: Batch): Map<String, OnnxTensor> =
        manifest.batch.zip(batch.arrays).associate { (row, bytes) ->
            val shape = longArrayOf(batch.examples.toLong(), *row.shape)
            "batch.${row.name}" to OnnxTensor.createTensor(environment, bytes, shape, TYPES.getValue(row.dtype))
        }

    private fun scalar(value: Float): OnnxTensor =
        OnnxTensor.createTensor(environment, floats(1).put(0, value), longArrayOf())

    private fun floats(size: Int): FloatBuffer = direct(4 * size).asFloatBuffer()

    /** The tensors of a vector by the graph's names: views into it, which are not copied. */
    private fun tensors(prefix: String, values: FloatBuffer, rows: List<Row>): Map<String, OnnxTensor> =
        rows.associate {
            val begin = it.offset.toInt()
            val part = values.duplicate().apply { limit(begin + it.elements.toInt()).position(begin) }
            "$prefix.${it.name}" to OnnxTensor.createTensor(environment, part.slice(), it.shape)
        }
}

/** The whole buffer, from its beginning, without moving the buffer itself. */
private fun FloatBuffer.whole(): FloatBuffer = duplicate().apply { clear() }
