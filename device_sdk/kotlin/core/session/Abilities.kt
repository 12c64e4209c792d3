package fleetlearn.session

import fleetlearn.protocol.EXCHANGE_KINDS
import fleetlearn.protocol.FAMILIES
import fleetlearn.protocol.Float32
import fleetlearn.protocol.Message
import fleetlearn.protocol.contentOf
import fleetlearn.protocol.objects

/** What this SDK can do for privacy, as a check-in says it. It adds no noise, and no masks. */
val PRIVACY = listOf("clip")

/** Return what of a task or a question this SDK cannot do, for people; null if it can do all. Throws ProtocolException
 * on a question whose content is not as its kind says. */
fun unsupported(task: Message): String? = if (task.type == "question") unknownQuestion(task) else unknownTask(task)

private fun unknownTask(task: Message): String? {
    val algorithm = task["algorithm"]
    if (algorithm != "plain") return "the task asks for the algorithm $algorithm; this device knows plain"
    val parts = (task["parts"] as Map<*, *>).entries.associate { it.key as String to it.value as String }
    if (task["local_noise"] != null) {
        return "the task asks the device to add noise to its update; this device cannot do that"
    }
    if (task["secure"] != null) return "the task asks for a masked update; this device cannot mask"
    // Whether the bundle has buffers is known once it is here.
    val wanted = listOf("update") + if ("buffers" in parts) listOf("buffers") else emptyList()
    return differing("sends the vectors", sent(task), listOf("model"), listOf(Float32.name))
        ?: differing("asks for the parts", parts, wanted, FAMILIES)
}

private fun unknownQuestion(question: Message): String? {
    val known = EXCHANGE_KINDS.keys.joinToString()
    val kind = EXCHANGE_KINDS[question.text("kind")]
        ?: return "the question is of the kind ${question["kind"]}; this device knows $known"
    contentOf(question)
    if (question["bundle"] == null) return "the question of the kind ${question["kind"]} names no bundle"
    return differing("sends the vectors", sent(question), kind.vectors, listOf(Float32.name))
}

private fun sent(task: Message): Map<String, String> =
    task["vectors"].objects().associate { it["name"] as String to it["encoding"] as String }

private fun differing(what: String, given: Map<String, String>, names: List<String>, families: List<String>): String? {
    if (given.keys == names.toSet() && given.values.all { it in families }) return null
    val listed = given.entries.joinToString { "${it.key} (${it.value})" }
    return "the task $what $listed; this device knows ${names.joinToString()} (${families.joinToString()})"
}
