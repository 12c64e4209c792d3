package fleetlearn.protocol

import java.nio.ByteBuffer
import java.nio.ByteOrder
import kotlin.math.abs
import kotlin.math.floor
import kotlin.math.nextUp

/** How a vector of float32 becomes the bytes that travel (PROTOCOL.md, section 4). float16, bfloat16, int4 and top-k
 * are not here: a coordinator asks a device only for what it names. */
sealed class Encoding(val name: String, val block: Int) {
    /** Bytes of a block of this many elements. */
    protected abstract fun blockSize(elements: Int): Int

    protected abstract fun encode(from: FloatArray, begin: Int, end: Int, to: ByteBuffer, fractions: Fractions)

    protected abstract fun decode(from: ByteBuffer, to: FloatArray, begin: Int, end: Int)

    val blockBytes: Int get() = blockSize(block)

    fun size(elements: Int): Long {
        val rest = elements % block
        return (elements / block).toLong() * blockBytes + if (rest > 0) blockSize(rest) else 0
    }

    /** Throws ProtocolException (not-finite). */
    fun encode(vector: FloatArray, seed: Long = 0): ByteArray {
        checkFinite(vector)
        val to = ByteBuffer.allocate(size(vector.size).toInt()).order(ByteOrder.LITTLE_ENDIAN)
        val fractions = Fractions(seed)
        for (begin in vector.indices step block) {
            encode(vector, begin, minOf(begin + block, vector.size), to, fractions)
        }
        return to.array()
    }

    /** Throws ProtocolException (wrong-length, not-finite, bad-encoding). */
    fun decode(content: ByteArray, elements: Int = content.size / blockBytes * block): FloatArray {
        if (content.size.toLong() != size(elements)) {
            val text = "${content.size} bytes of $name were given; $elements elements take ${size(elements)}"
            throw ProtocolException("wrong-length", text)
        }
        val from = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN)
        val vector = FloatArray(elements)
        for (begin in vector.indices step block) decode(from, vector, begin, minOf(begin + block, elements))
        checkFinite(vector)
        return vector
    }
}

object Float32 : Encoding("float32", 1) {
    override fun blockSize(elements: Int) = 4 * elements

    override fun encode(from: FloatArray, begin: Int, end: Int, to: ByteBuffer, fractions: Fractions) {
        for (index in begin until end) to.putFloat(from[index])
    }

    override fun decode(from: ByteBuffer, to: FloatArray, begin: Int, end: Int) {
        for (index in begin until end) to[index] = from.getFloat()
    }
}

/** A scale for each 256 elements, and an integer for each: floor(x / scale + u), with a random fraction u. */
object Int8 : Encoding("int8", 256) {
    private const val LEVELS = 127

    override fun blockSize(elements: Int) = 4 + elements

    override fun encode(from: FloatArray, begin: Int, end: Int, to: ByteBuffer, fractions: Fractions) {
        var largest = 0f
        for (index in begin until end) largest = maxOf(largest, abs(from[index]))
        // the smallest single-precision number that is at least largest / LEVELS
        var scale = (largest.toDouble() / LEVELS).toFloat()
        if (scale.toDouble() * LEVELS < largest.toDouble()) scale = scale.nextUp()
        to.putFloat(scale)
        for (index in begin until end) {
            val fraction = fractions.next()
            val drawn = if (scale == 0f) 0.0 else floor(from[index].toDouble() / scale + fraction)
            to.put(drawn.toInt().coerceIn(-128, 127).toByte())
        }
    }

    override fun decode(from: ByteBuffer, to: FloatArray, begin: Int, end: Int) {
        val scale = from.getFloat()
        if (!scale.isFinite()) throw ProtocolException("not-finite", "a scale of int8 is $scale")
        for (index in begin until end) to[index] = scale * from.get()
    }
}

/** What a device says that it knows. */
val FAMILIES = listOf(Float32.name, Int8.name)

/** Return the encoding of this name. Throws ProtocolException (bad-encoding). */
fun findEncoding(name: String): Encoding = when (name) {
    Float32.name -> Float32
    Int8.name -> Int8
    else -> {
        val text = "there is no encoding $name here; known are ${FAMILIES.joinToString()}"
        throw ProtocolException("bad-encoding", text)
    }
}

/** Throws ProtocolException (not-finite). */
fun checkFinite(vector: FloatArray) {
    val index = vector.indexOfFirst { !it.isFinite() }
    if (index >= 0) throw ProtocolException("not-finite", "element $index is ${vector[index]}")
}
