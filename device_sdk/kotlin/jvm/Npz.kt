package fleetlearn.jvm

import fleetlearn.training.Column
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Path
import java.util.zip.ZipFile

private val TYPES =
    mapOf("<f4" to "float32", "<f8" to "float64", "<i8" to "int64", "<i4" to "int32", "|u1" to "uint8", "|b1" to "bool")

/** Read the arrays of NumPy's .npz. */
fun readNpz(path: Path): Map<String, Column> = ZipFile(path.toFile()).use { zip ->
    zip.entries().asSequence().associate { entry ->
        entry.name.removeSuffix(".npy") to column(entry.name, zip.getInputStream(entry).readBytes())
    }
}

private fun column(name: String, content: ByteArray): Column {
    val bytes = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN)
    val begin = if (content[6].toInt() == 1) 10 + bytes.getShort(8) else 12 + bytes.getInt(8)
    val header = String(content, 0, begin, Charsets.ISO_8859_1)
    fun field(pattern: String) = Regex(pattern).find(header)?.groupValues?.get(1)
    val dtype = TYPES[field("'descr': '([^']+)'")]
        ?: throw IllegalArgumentException("$name: $header is of an unknown type")
    require("'fortran_order': False" in header) { "$name is in Fortran's order; save it in C's" }
    val shape = field("'shape': \\(([^)]*)\\)")!!.split(",").map { it.trim() }.filter { it.isNotEmpty() }
        .map { it.toLong() }
    val direct = ByteBuffer.allocateDirect(content.size - begin).put(content, begin, content.size - begin).flip()
    return Column(dtype, shape.toLongArray(), direct)
}
