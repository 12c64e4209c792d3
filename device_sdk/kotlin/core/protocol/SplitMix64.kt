package fleetlearn.protocol

private const val GAMMA = -0x61c8864680b583ebL // 0x9E3779B97F4A7C15

/** The stream of a seed that roundings are drawn from. Smaller numbers are epochs, whose streams order the examples. */
const val ROUNDING = 1L shl 32

/** SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the numbers mix(s + GAMMA), mix(s + 2 GAMMA), ... of the state s =
 * mix(mix(seed) + stream). */
class SplitMix64(seed: Long, stream: Long) {
    private var state = mix(mix(seed) + stream)

    fun next(): Long {
        state += GAMMA
        return mix(state)
    }

    private fun mix(value: Long): Long {
        var z = (value xor (value ushr 30)) * -0x40a7b892e31b1a47L // 0xBF58476D1CE4E5B9
        z = (z xor (z ushr 27)) * -0x6b2fb644ecceee15L // 0x94D049BB133111EB
        return z xor (z ushr 31)
    }
}

/** Random fractions below 1, multiples of 2^-32: the lower half of each number of the seed's stream, then its upper. */
class Fractions(seed: Long) {
    private val numbers = SplitMix64(seed, ROUNDING)
    private var number = 0L
    private var upperIsNext = false

    fun next(): Double {
        upperIsNext = !upperIsNext
        if (upperIsNext) number = numbers.next()
        val half = if (upperIsNext) number and 0xffffffffL else number ushr 32
        return half.toDouble() / (1L shl 32)
    }
}

/** Return the places of the examples in their order in this pass, as the other SDKs do: example i has number i + 1 of
 * the stream; they are sorted by the upper halves of their numbers, those with equal halves as they stand. */
fun permutation(examples: Int, seed: Long, epoch: Long): IntArray {
    val numbers = SplitMix64(seed, epoch)
    val keys = LongArray(examples) { (numbers.next() and -0x100000000L) or it.toLong() }
    // sorted as unsigned numbers
    for (index in keys.indices) keys[index] = keys[index] xor Long.MIN_VALUE
    keys.sort()
    return IntArray(examples) { keys[it].toInt() }
}
