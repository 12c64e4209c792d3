// Runs docs/start/phones/TrainingStep.kt on the JVM: SPEC.json says what to train. test_phones.py writes it, and compares.

import ai.onnxruntime.OnnxTensor
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import org.json.JSONArray
import org.json.JSONObject

fun main(arguments: Array<String>) {
    val spec = JSONObject(File(arguments[0]).readText())
    fun read(name: String) = ByteBuffer.wrap(File(spec.getString(name)).readBytes()).order(ByteOrder.LITTLE_ENDIAN)
    val width = spec.getInt("width")
    val losses = JSONArray()
    TrainingStep(File(spec.getString("bundle"))).use { training ->
        training.load(read("local").asFloatBuffer(), read("state").asFloatBuffer())
        val hyper = training.manifest.hyper.associateWith { spec.getJSONObject("hyper").getDouble(it).toFloat() }
        val (x, y) = read("x").asFloatBuffer() to read("y").asLongBuffer()
        val steps = spec.getJSONArray("steps")
        for (number in 0 until steps.length()) {
            val step = steps.getJSONObject(number)
            val (begin, count) = step.getInt("begin") to step.getInt("count")
            val batch = mapOf(
                "x" to training.floats(FloatArray(count * width) { x.get(begin * width + it) }, count.toLong(), width.toLong()),
                "y" to training.longs(LongArray(count) { y.get(begin + it) }, count.toLong()),
            )
            losses.put(training.step(batch, step.getLong("seed"), hyper).toDouble())
            batch.values.forEach(OnnxTensor::close)
        }
        write(File(spec.getString("output"), "local.bin"), training.local())
        write(File(spec.getString("output"), "state.bin"), training.state())
        println(JSONObject().put("losses", losses).put("results", training.results.keys.joinToString()))
    }
}

private fun write(file: File, values: FloatArray) {
    val bytes = ByteBuffer.allocate(4 * values.size).order(ByteOrder.LITTLE_ENDIAN)
    bytes.asFloatBuffer().put(values)
    file.writeBytes(bytes.array())
}
