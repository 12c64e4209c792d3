package fleetlearn.storage

import java.nio.ByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.Files
import java.nio.file.NoSuchFileException
import java.nio.file.Path
import java.nio.file.StandardCopyOption.ATOMIC_MOVE
import java.nio.file.StandardOpenOption.CREATE
import java.nio.file.StandardOpenOption.READ
import java.nio.file.StandardOpenOption.TRUNCATE_EXISTING
import java.nio.file.StandardOpenOption.WRITE

/** Write a file beside its place, sync it, and rename it: a crash leaves the old file or the new one. */
fun writeDurably(path: Path, vararg contents: ByteArray) {
    val draft = path.resolveSibling("${path.fileName}.tmp")
    FileChannel.open(draft, CREATE, WRITE, TRUNCATE_EXISTING).use { file ->
        for (content in contents) {
            val bytes = ByteBuffer.wrap(content)
            while (bytes.hasRemaining()) file.write(bytes)
        }
        // The name must not be durable before the bytes.
        file.force(true)
    }
    Files.move(draft, path, ATOMIC_MOVE)
    syncFolder(path.parent)
}

/** Make the names in a folder durable, where the system lets a folder be opened. */
private fun syncFolder(folder: Path) {
    if (System.getProperty("os.name").startsWith("Windows")) return
    FileChannel.open(folder, READ).use { it.force(true) }
}

/** Return a file's bytes; null where it is not there. */
fun readIfThere(path: Path): ByteArray? = try {
    Files.readAllBytes(path)
} catch (_: NoSuchFileException) {
    null
}

/** Return the files in a folder. */
fun filesIn(folder: Path): List<Path> = Files.list(folder).use { it.toList() }
