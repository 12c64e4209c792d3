package fleetlearn.protocol

import java.util.zip.DataFormatException
import java.util.zip.Inflater

/** Return the vector's bytes that a difference gives (PROTOCOL.md, "Differences"). Throws ProtocolException
 * (bad-encoding). */
fun applyDelta(base: ByteArray, delta: ByteArray): ByteArray {
    // One byte more than is wanted: a small difference must not become a huge vector.
    val difference = ByteArray(base.size + 1)
    val inflater = Inflater()
    var size = 0
    val rest = try {
        inflater.setInput(delta)
        while (size < difference.size && !inflater.finished() && !inflater.needsInput()) {
            size += inflater.inflate(difference, size, difference.size - size)
            if (inflater.needsDictionary()) throw DataFormatException("it needs a dictionary")
        }
        if (inflater.finished()) inflater.remaining else -1
    } catch (error: DataFormatException) {
        throw ProtocolException("bad-encoding", "the difference cannot be decompressed: ${error.message}")
    } finally {
        inflater.end()
    }
    if (size != base.size || base.size % 4 != 0 || rest != 0) {
        throw ProtocolException("bad-encoding", "the difference gives other bytes than the ${base.size} of its base")
    }
    val elements = base.size / 4
    return ByteArray(base.size) { place ->
        (base[place].toInt() xor difference[place % 4 * elements + place / 4].toInt()).toByte()
    }
}
