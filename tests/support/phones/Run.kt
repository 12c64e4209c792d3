// Runs the step of docs/phones/TrainingStep.kt on the JVM: Run.kt SPEC.json. tests/test_phones.py writes SPEC.json and compares.

import ai.onnxruntime.OnnxTensor
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import org.json.JSONArray
import org.json.JSONObject

fun main(arguments: Array<String>) {
    val spec = JSONObject(File(arguments[0]).readText())
    fun read(name: String) = ByteBuffer.wrap(File(spec.getString(name)).readBytes()).order(ByteOrder.LITTLE_ENDIAN)
    val hyper = spec.getJSONObject("hyper").let { given -> given.keys().asSequence().associateWith { given.getDouble(it).toFloat() } }
    val losses = JSONArray()
    TrainingStep(File(spec.getString("bundle"))).use { training ->
        training.load(read("local").asFloatBuffer(), read("state").asFloatBuffer())
        val steps = spec.getJSONArray("steps")
        for (number in 0 until steps.length()) {
            val given = steps.getJSONObject(number)
            val x = read("x").asFloatBuffer()
            val rows = given.getInt("begin") until given.getInt("end")
            val shape = spec.getJSONArray("shape").let { axes -> LongArray(axes.length()) { axes.getLong(it) } }
            val width = shape.fold(1L, Long::times).toInt()
            val values = FloatArray(rows.count() * width) { x.get(rows.first * width + it) }
            val labels = read("y").asLongBuffer()
            val batch = mapOf(
                "x" to training.floats(values, rows.count().toLong(), *shape),
                "y" to training.longs(LongArray(rows.count()) { labels.get(rows.first + it) }, rows.count().toLong()),
            )
            val loss = training.step(batch, given.getLong("seed"), hyper)
            losses.put(JSONObject(training.results as Map<*, *>).put("loss", loss.toDouble()))
            batch.values.forEach(OnnxTensor::close)
        }
        write(spec.getString("output") + "/local.bin", training.local())
        write(spec.getString("output") + "/state.bin", training.state())
    }
    File(spec.getString("output"), "losses.json").writeText(losses.toString())
}

private fun write(path: String, values: FloatArray) {
    val bytes = ByteBuffer.allocate(4 * values.size).order(ByteOrder.LITTLE_ENDIAN)
    bytes.asFloatBuffer().put(FloatBuffer.wrap(values))
    File(path).writeBytes(bytes.array())
}
