// Holds the Kotlin SDK to protocol/vectors: `VectorsKt FOLDER` prints what differs, and how many cases it tried.
// test_kotlin.py compiles it beside the SDK.

import fleetlearn.jvm.verify
import fleetlearn.protocol.EXCHANGE_KINDS
import fleetlearn.protocol.FAMILIES
import fleetlearn.protocol.Json
import fleetlearn.protocol.Message
import fleetlearn.protocol.ProtocolException
import fleetlearn.protocol.applyDelta
import fleetlearn.protocol.contentOf
import fleetlearn.protocol.crc32
import fleetlearn.protocol.encode
import fleetlearn.protocol.findEncoding
import fleetlearn.protocol.fromHex
import fleetlearn.protocol.hex
import fleetlearn.protocol.packChunk
import fleetlearn.protocol.readFromCoordinator
import fleetlearn.protocol.readFromDevice
import fleetlearn.protocol.readManifest
import fleetlearn.protocol.sha256
import fleetlearn.protocol.signedBytes
import fleetlearn.protocol.unpackChunk
import fleetlearn.session.PRIVACY
import fleetlearn.session.unsupported
import fleetlearn.storage.bytesOf
import fleetlearn.storage.floatsOf
import fleetlearn.training.factorAt
import java.io.File
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException
import kotlin.system.exitProcess

private typealias Case = Map<String, Any?>

private var tried = 0
private var wrong = 0

fun main(arguments: Array<String>) {
    val folder = File(arguments[0])
    messages(read(folder, "messages.json"))
    frames(read(folder, "frames.json"))
    encodings(read(folder, "encodings.json"))
    vector(read(folder, "vector.json"))
    manifests(read(folder, "manifest.json"))
    signatures(read(folder, "signing.json"))
    masked(read(folder, "secure.json"))
    learningRates(read(folder, "learning_rates.json"))
    println("$tried cases, $wrong differ")
    exitProcess(if (wrong == 0) 0 else 1)
}

private fun messages(file: Case) {
    for (case in file.cases("valid")) {
        val fromDevice = case["direction"] == "from-device"
        val text = case["text"] as String
        val found = (if (fromDevice) ::readFromDevice else ::readFromCoordinator)(text)
        val whole = mapOf("type" to found.type) + found.fields
        equal(case, plain(whole), plain(case["fields"] ?: Json.read(text)))
        if (fromDevice) equal(case, plain(Json.read(encode(found))), plain(whole))
    }
    for (case in file.cases("invalid")) {
        val text = try {
            Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(content(case))).toString()
        } catch (_: CharacterCodingException) {
            continue // the WebSocket refuses such a frame
        }
        val reader = if (case["direction"] == "from-device") ::readFromDevice else ::readFromCoordinator
        refused(case) { reader(text) }
    }
    for (case in file.cases("contents")) {
        val (kind, of) = case["kind"] as String to case["of"] as String
        if (kind !in EXCHANGE_KINDS) continue // kinds of the tests' own
        val fields = mapOf("task" to "t", "kind" to kind, "content" to case["content"])
        equal(case, codeOf { contentOf(Message(of, fields)) }, if (case["good"] == true) null else "bad-message")
    }
}

private fun frames(file: Case) {
    for (case in file.cases("valid")) {
        val frame = fromHex(case["header"] as String) + pieces(case["payload"])
        val chunk = unpackChunk(frame)
        equal(case, listOf(chunk.transfer, chunk.offset), listOf(case["transfer"], case["offset"]))
        equal(case, hex(packChunk(chunk.transfer, chunk.offset, chunk.payload)), hex(frame))
    }
    for (case in file.cases("invalid")) refused(case) { unpackChunk(pieces(case["frame"])) }
}

private fun encodings(file: Case) {
    for (case in file.cases("valid")) {
        if (!known(case)) continue
        val (encoding, vector) = findEncoding(case["encoding"] as String) to floatsOf(fromHex(case["vector"] as String))
        val bytes = encoding.encode(vector, case["seed"] as Long)
        equal(case, hex(bytes), case["hex"])
        equal(case, encoding.encode(encoding.decode(bytes, vector.size), 0).size, bytes.size)
    }
    for (case in file.cases("invalid")) {
        // An encoding that this SDK lacks does not exist for it, whatever is wrong with the bytes.
        if (!known(case) && case["code"] != "bad-encoding") continue
        refused(case) {
            val elements = (case["elements"] as Long).toInt()
            findEncoding(case["encoding"] as String).decode(fromHex(case["hex"] as String), elements)
        }
    }
    for (case in file.cases("deltas")) {
        val (base, delta) = fromHex(case["base"] as String) to fromHex(case["hex"] as String)
        equal(case, hex(applyDelta(base, delta)), case["vector"])
    }
    for (case in file.cases("invalid_deltas")) {
        refused(case) { applyDelta(fromHex(case["base"] as String), fromHex(case["hex"] as String)) }
    }
}

private fun vector(file: Case) {
    fun part(name: String) = file.case(name)
    fun values(name: String) = floatsOf(fromHex(part(name)["hex"] as String))
    val (model, trained) = values("model") to values("trained")
    val update = FloatArray(model.size) { trained[it] - model[it] }
    var buffers = FloatArray(0)
    for (row in file.cases("table").filter { it["buffer"] == true }) {
        val begin = (row["offset"] as Long).toInt()
        val end = begin + (row["shape"] as List<*>).fold(1L) { product, axis -> product * axis as Long }.toInt()
        buffers += trained.copyOfRange(begin, end)
        update.fill(0f, begin, end)
    }
    for ((name, values) in listOf("model" to model, "trained" to trained, "update" to update, "buffers" to buffers)) {
        val bytes = findEncoding("float32").encode(values)
        val expected = listOf("hex", "sha256", "crc32").map(part(name)::get)
        equal(part(name), listOf(hex(bytes), sha256(bytes), crc32(bytes)), expected)
        equal(part(name), hex(bytesOf(values)), hex(bytes))
    }
    for (case in file.cases("invalid")) {
        val elements = (case["elements"] as Long).toInt()
        refused(case) { findEncoding("float32").decode(fromHex(case["hex"] as String), elements) }
    }
}

private fun manifests(file: Case) {
    val valid = file.case("valid")
    val text = valid["text"] as String
    val manifest = readManifest(text.encodeToByteArray())
    equal(valid, sha256(text.encodeToByteArray()), valid["sha256"])
    equal(valid, listOf(manifest.size.toLong(), manifest.localSize), listOf(valid["elements"], valid["local_elements"]))
    @Suppress("UNCHECKED_CAST")
    val fields = Json.read(text) as Case
    for (case in file.cases("invalid")) {
        @Suppress("UNCHECKED_CAST")
        val change = case["change"] as Case?
        // Bundles of version 3 have preprocessing: this SDK does not know that version.
        if (change != null && ("preprocessing" in change || change["version"] == 3L)) continue
        val bytes = when {
            change != null -> Json.write(fields + change).encodeToByteArray()
            "without" in case -> Json.write(fields - case["without"] as String).encodeToByteArray()
            else -> content(case)
        }
        refused(case) { readManifest(bytes) }
    }
}

private fun signatures(file: Case) {
    for (case in file.cases("rfc8032")) {
        val (key, signature) = case["public"] as String to case["signature"] as String
        val message = fromHex(case["message"] as String)
        equal(case, verify(key, signature, message), true)
        equal(case, verify(key, signature, message + 1), false)
    }
    for ((table, good) in listOf("valid" to true, "invalid" to false)) {
        for (case in file.cases(table)) {
            val bytes = signedBytes(case["challenge"] as String, case["device"] as String, case["message"] as String)
            if (good) equal(case, hex(bytes), case["bytes"])
            equal(case, verify(case["key"] as String, case["signature"] as String, bytes), good)
        }
    }
}

private fun read(folder: File, name: String): Case {
    @Suppress("UNCHECKED_CAST")
    return Json.read(File(folder, name).readText()) as Case
}

private fun Case.cases(name: String): List<Case> {
    @Suppress("UNCHECKED_CAST")
    return this[name] as List<Case>
}

private fun Case.case(name: String): Case {
    @Suppress("UNCHECKED_CAST")
    return this[name] as Case
}

/** This SDK cannot mask: it says so at the check-in, and gives back each such task, whatever parts it asks for. */
private fun masked(file: Case) {
    equal(mapOf("name" to "abilities"), "secure" in PRIVACY, false)
    for (case in file.cases("training")) {
        val fields = case["task"] as Map<*, *>
        for (encoding in listOf("masked", "float32")) {
            // The first words of what the device says are of the first thing that it lacks.
            val task = fields + mapOf("parts" to mapOf("update" to encoding), "algorithm" to "plain")
            val said = unsupported(readFromCoordinator(Json.write(task)))
            equal(case, said, "the task asks for a masked update; this device cannot mask")
        }
    }
}

private fun learningRates(file: Case) {
    for (case in file.cases("factors")) {
        @Suppress("UNCHECKED_CAST")
        val schedule = case["schedule"] as Map<String, Any?>
        val steps = case["steps"] as Long
        equal(case, (0 until steps).map { factorAt(schedule, it, steps) }, case["factors"])
    }
}

private fun known(case: Case) = (case["encoding"] as String).substringBefore("-") in FAMILIES

/** The bytes of a case: of a text, in hexadecimal, or in pieces that are repeated. */
private fun content(case: Case): ByteArray = when {
    "text" in case -> (case["text"] as String).encodeToByteArray()
    "hex" in case -> fromHex(case["hex"] as String)
    else -> (case["pieces"] as List<*>).joinToString("") { piece ->
        (piece as List<*>).let { (it[0] as String).repeat((it[1] as Long).toInt()) }
    }.encodeToByteArray()
}

/** Bytes in hexadecimal, each piece to be repeated. */
private fun pieces(value: Any?): ByteArray = fromHex((value as List<*>).joinToString("") { piece ->
    (piece as List<*>).let { (it[0] as String).repeat((it[1] as Long).toInt()) }
})

/** Numbers are the same however they are written. */
private fun plain(value: Any?): Any? = when (value) {
    is Map<*, *> -> value.mapValues { plain(it.value) }
    is List<*> -> value.map(::plain)
    is Number -> value.toDouble() + 0.0
    else -> value
}

private fun codeOf(act: () -> Unit): String? = try {
    act()
    null
} catch (error: ProtocolException) {
    error.code
}

private fun refused(case: Case, act: () -> Any?) = equal(case, codeOf { act() }, case["code"])

private fun equal(case: Case, found: Any?, expected: Any?) {
    tried++
    if (found == expected) return
    wrong++
    println("DIFFERENT ${case["name"]} ${case["direction"] ?: ""}: found $found, expected $expected".take(600))
}
