package fleetlearn.training

import fleetlearn.protocol.Row
import fleetlearn.protocol.permutation
import java.nio.ByteBuffer
import java.nio.ByteOrder

private val WIDTHS = mapOf("float32" to 4, "float64" to 8, "int64" to 8, "int32" to 4, "uint8" to 1, "bool" to 1)

/** One array of the device's examples: `bytes` are little-endian, in row-major order; the first axis is the
 * examples'. */
class Column(val dtype: String, val shape: LongArray, bytes: ByteBuffer) {
    val bytes: ByteBuffer = bytes.duplicate().order(ByteOrder.LITTLE_ENDIAN)
    val elements get() = shape.fold(1L, Long::times).toInt()

    init {
        val width = WIDTHS[dtype] ?: throw badData("arrays of ${WIDTHS.keys.joinToString()} are known, not of $dtype")
        if (bytes.remaining() != width * elements) {
            val expected = "${shape.contentToString()} of $dtype has ${width * elements}"
            throw badData("${bytes.remaining()} bytes were given; $expected")
        }
    }

    fun number(index: Int): Double = when (dtype) {
        "float32" -> bytes.getFloat(4 * index).toDouble()
        "float64" -> bytes.getDouble(8 * index)
        else -> integer(index).toDouble()
    }

    fun integer(index: Int): Long = when (dtype) {
        "int64" -> bytes.getLong(8 * index)
        "int32" -> bytes.getInt(4 * index).toLong()
        "uint8", "bool" -> bytes.get(index).toLong() and 0xff
        else -> throw badData("values of $dtype were given where integers are expected")
    }
}

/** One batch: the bytes of each array in the manifest's order, in direct buffers; and how many examples they have. */
class Batch(val arrays: List<ByteBuffer>, val examples: Int)

fun badData(text: String) = TrainingException("bad-data", text)

/** The device's arrays, checked against the batch of a bundle and in its dtypes. Throws TrainingException
 * (bad-data). */
class FittedData(columns: Map<String, Column>, val inputs: List<Row>) {
    private val arrays: List<ByteBuffer>
    val examples: Int

    init {
        if (columns.keys != inputs.map { it.name }.toSet()) {
            throw badData("arrays ${columns.keys.sorted()} were given; expected ${inputs.map { it.name }.sorted()}")
        }
        examples = examplesOf(columns)
        arrays = inputs.map { fitted(columns.getValue(it.name), it) }
    }

    /** One pass: in the order of (seed, epoch), or of the data where the seed is null. Size 0: one batch. */
    fun batches(size: Int, seed: Long?, epoch: Long = 0): Sequence<Batch> {
        val order = if (seed == null) IntArray(examples) { it } else permutation(examples, seed, epoch)
        val step = if (size == 0) examples else size
        return (0 until examples step step).asSequence().map { begin ->
            val end = minOf(begin + step, examples)
            Batch(inputs.indices.map { rows(it, order, begin, end) }, end - begin)
        }
    }

    /** Return what to say of the first NaN or infinity, or null. */
    fun firstNonfinite(): String? {
        for ((row, bytes) in inputs.zip(arrays)) {
            val value: (Int) -> Double = when (row.dtype) {
                "float32" -> { index -> bytes.getFloat(4 * index).toDouble() }
                "float64" -> { index -> bytes.getDouble(8 * index) }
                else -> continue
            }
            val index = (0 until examples * row.elements.toInt()).firstOrNull { !value(it).isFinite() } ?: continue
            return "array ${row.name} has the value ${value(index)} in example ${index / row.elements} (the first is 0)"
        }
        return null
    }

    private fun rows(array: Int, order: IntArray, begin: Int, end: Int): ByteBuffer {
        val (row, source) = inputs[array] to arrays[array]
        val length = row.elements.toInt() * WIDTHS.getValue(row.dtype)
        val target = direct((end - begin) * length)
        for (place in begin until end) {
            val part = source.duplicate()
            part.limit((order[place] + 1) * length).position(order[place] * length)
            target.put(part)
        }
        target.flip()
        return target
    }

    private fun fitted(column: Column, row: Row): ByteBuffer {
        if (!column.shape.drop(1).toLongArray().contentEquals(row.shape)) {
            val given = column.shape.contentToString()
            throw badData("array ${row.name} has shape $given; expected (n, ${row.shape.joinToString()})")
        }
        checkRange(column, row)
        if (column.dtype == row.dtype) return column.bytes
        val target = direct(column.elements * WIDTHS.getValue(row.dtype))
        for (index in 0 until column.elements) {
            when (row.dtype) {
                "float32" -> target.putFloat(column.number(index).toFloat())
                "float64" -> target.putDouble(column.number(index))
                "int64" -> target.putLong(column.integer(index))
                "int32" -> target.putInt(within(column, index, row, Int.MIN_VALUE.toLong()..Int.MAX_VALUE).toInt())
                else -> target.put(within(column, index, row, if (row.dtype == "bool") 0L..1L else 0L..255L).toByte())
            }
        }
        target.flip()
        return target
    }

    private fun within(column: Column, index: Int, row: Row, range: LongRange): Long = column.integer(index).also {
        if (it !in range) throw badData("array ${row.name} has the value $it, which does not fit ${row.dtype}")
    }

    /** An integer must name a class, or a row of a table (`below`). */
    private fun checkRange(column: Column, row: Row) {
        val below = row.below ?: return
        for (index in 0 until column.elements) {
            val value = column.integer(index)
            if (value in 0 until below || value == row.ignored) continue
            val where = "in example ${index / row.elements} (the first is 0)"
            val allowed = "0 to ${below - 1}" + (row.ignored?.let { ", or $it for what is left out" } ?: "")
            throw badData("array ${row.name} has the value $value $where; expected $allowed")
        }
    }
}

fun examplesOf(columns: Map<String, Column>): Int {
    val counts = columns.values.map { it.shape.firstOrNull() ?: 0 }.toSet()
    if (counts.size != 1 || counts.first() < 1) {
        val given = columns.mapValues { it.value.shape.firstOrNull() }
        throw badData("arrays with $given examples were given; expected as many in each")
    }
    return counts.first().toInt()
}

/** Bytes that ONNX Runtime reads and writes in place. */
fun direct(size: Int): ByteBuffer = ByteBuffer.allocateDirect(size).order(ByteOrder.nativeOrder())
