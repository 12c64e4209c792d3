package fleetlearn.training

import fleetlearn.protocol.BundleException
import fleetlearn.protocol.Json
import fleetlearn.protocol.JsonException
import fleetlearn.protocol.Manifest
import fleetlearn.protocol.PARAMETERS
import fleetlearn.protocol.Row
import fleetlearn.protocol.STATE
import fleetlearn.protocol.readManifest
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path

/** A bundle with its runtime, and what the device's first task of it begins with. Throws BundleException. */
class Bundle(val sha256: String, folder: Path, threads: Int) : AutoCloseable {
    val manifest: Manifest = readManifest(Files.readAllBytes(folder.resolve("manifest.json")))
    private val personalRows = manifest.parameters.filter { it.personal }
    private val keptRows = manifest.state.filter { it.kept }
    private val previousSize = if ("previous" in manifest.references) manifest.size else 0
    private val personal = tensors(folder, PARAMETERS, personalRows)
    private val state = if (STATE in manifest.files) tensors(folder, STATE, manifest.state)
    else FloatArray(manifest.stateSize.toInt())
    val runtime = Runtime(folder, manifest, threads)

    /** Elements of what a device keeps from task to task; 0 where it keeps nothing. */
    val keptSize = personal.size + keptRows.sumOf { it.elements }.toInt() + previousSize

    /** Load the round's model and what the last task kept; null at the device's first task of the bundle. */
    fun load(model: FloatArray, kept: FloatArray?) {
        if (kept == null) return runtime.load(model, personal, state, null)
        val begun = state.copyOf()
        var place = personal.size
        for (row in keptRows) {
            kept.copyInto(begun, row.offset.toInt(), place, place + row.elements.toInt())
            place += row.elements.toInt()
        }
        val previous = if (previousSize > 0) kept.copyOfRange(place, kept.size) else null
        runtime.load(model, kept.copyOfRange(0, personal.size), begun, previous)
    }

    /** Return what the device keeps for its next task: personal parameters, kept rows of the state, `previous`. */
    fun kept(local: FloatArray): FloatArray {
        val now = runtime.state()
        val rows = keptRows.map { now.copyOfRange(it.offset.toInt(), (it.offset + it.elements).toInt()) }
        val (own, previous) = local.copyOfRange(manifest.size, local.size) to local.copyOfRange(0, previousSize)
        return (listOf(own) + rows + listOf(previous)).fold(FloatArray(0), FloatArray::plus)
    }

    override fun close() = runtime.close()
}

/** Read float32 tensors of a safetensors file, one after the other. */
private fun tensors(folder: Path, file: String, rows: List<Row>): FloatArray {
    if (rows.isEmpty()) return FloatArray(0)
    val content = ByteBuffer.wrap(Files.readAllBytes(folder.resolve(file))).order(ByteOrder.LITTLE_ENDIAN)
    val values = FloatArray(rows.sumOf { it.elements }.toInt())
    var place = 0
    try {
        val size = content.getLong().toInt()
        val header = Json.read(content.array().decodeToString(8, 8 + size)) as Map<*, *>
        for (row in rows) {
            val begin = ((header[row.name] as Map<*, *>)["data_offsets"] as List<*>)[0] as Long
            val first = 8 + size + begin.toInt()
            for (index in 0 until row.elements.toInt()) values[place++] = content.getFloat(first + 4 * index)
        }
    } catch (error: Exception) {
        if (error !is JsonException && error !is RuntimeException) throw error
        throw BundleException("bad-message", "$file does not have the manifest's tensors: ${error.message}")
    }
    return values
}
