package fleetlearn.training

import fleetlearn.protocol.Encoding
import fleetlearn.protocol.checkFinite
import kotlin.math.max
import kotlin.math.sqrt

/** Encodings that are tried before zeros are sent. One is enough for nearly every update that is not clipped. */
private const val TRIES = 24

/** The least part by which a second try is shorter: half of the distance of two floats. */
private const val LEAST_EXCESS = 1.0 / (1 shl 24)

/** An update as it is sent. `clipped`: it was longer than the bound before it was encoded. */
class ClippedUpdate(val content: ByteArray, val clipped: Boolean)

/** Scale an update to the L2 norm `clip` where it is longer, and encode it, so that what its bytes mean is no longer
 * either: an encoding that rounds may make it longer (McMahan, Ramage, Talwar and Zhang, arXiv 1710.06963, algorithm 1).
 * Throws ProtocolException (not-finite). */
fun encodeClipped(encoding: Encoding, update: FloatArray, seed: Long, clip: Double): ClippedUpdate {
    checkFinite(update)
    val norm = norm(update)
    val clipped = norm > clip
    var factor = if (clipped) clip / norm else 1.0
    repeat(TRIES) { attempt ->
        val tried = FloatArray(update.size) { (update[it] * factor).toFloat() }
        val content = encoding.encode(tried, seed)
        val length = norm(encoding.decode(content, update.size))
        if (length <= clip) return ClippedUpdate(content, clipped)
        // Rounding to nearest can give the same values again for an update that is little shorter: each try goes twice
        // as far as the one before.
        factor /= 1 + max(length / clip - 1, LEAST_EXCESS) * (1L shl attempt)
    }
    return ClippedUpdate(encoding.encode(FloatArray(update.size), seed), clipped)
}

private fun norm(vector: FloatArray): Double = sqrt(vector.sumOf { it.toDouble() * it })
