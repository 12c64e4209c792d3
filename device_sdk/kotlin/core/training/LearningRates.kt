package fleetlearn.training

import kotlin.math.max

/** Terms of the sine's series behind the first. */
private const val TERMS = 11

/**
 * Return by what a step of a task multiplies the learning rate (PROTOCOL.md, section 4, "Learning rate by step"):
 * additions, products and quotients alone, in this order, so that every SDK has the same bits. [schedule]: the task's.
 * [step]: from 0. [steps]: how many the whole task has.
 */
fun factorAt(schedule: Map<String, Any?>, step: Long, steps: Long): Double {
    val (start, warmUp) = schedule["start"] as Double to schedule["warm_up"] as Long
    val number = schedule["first"] as Long + step
    if (number < warmUp) {
        val share = number.toDouble() / warmUp
        return start + (1.0 - start) * if (schedule["kind"] == "one-cycle") 1.0 - halfWave(share) else share
    }
    return max(schedule["least"] as Double, afterWarmUp(schedule, number - warmUp, steps - warmUp))
}

private fun afterWarmUp(schedule: Map<String, Any?>, after: Long, left: Long): Double {
    val (factor, least) = schedule["factor"] as Double to schedule["least"] as Double
    when (schedule["kind"]) {
        "constant" -> return 1.0
        "step" -> return power(factor, after / schedule["every"] as Long)
        "exponential" -> return power(factor, after)
    }
    val length = schedule["steps"] as Long? ?: max(1L, left)
    if (after >= length) return least
    val share = after.toDouble() / length
    val height = if (schedule["kind"] == "linear") 1.0 - share else halfWave(share)
    return least + (1.0 - least) * height
}

/** Return (1 + cos(pi share)) / 2 for a share from 0 to 1, by the series of the sine of pi (1/2 - share). */
private fun halfWave(share: Double): Double {
    val angle = Math.PI * (0.5 - share)
    val square = angle * angle
    var series = 1.0
    for (term in TERMS downTo 1) series = 1.0 - square * series / (2 * term * (2 * term + 1))
    return (1.0 + angle * series) / 2.0
}

/** Return the base to the power of a whole number, at least 0, by squaring. */
private fun power(base: Double, exponent: Long): Double {
    var (result, square, rest) = Triple(1.0, base, exponent)
    while (rest > 0) {
        if (rest % 2 == 1L) result *= square
        square *= square
        rest /= 2
    }
    return result
}
