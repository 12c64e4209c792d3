package fleetlearn.storage

import fleetlearn.protocol.MAX_MANIFEST_BYTES
import fleetlearn.protocol.MAX_VECTORS
import fleetlearn.protocol.Message
import fleetlearn.protocol.ProtocolException
import fleetlearn.protocol.applyDelta
import fleetlearn.protocol.objects
import fleetlearn.protocol.readManifest
import fleetlearn.protocol.sha256
import fleetlearn.session.Wanted
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.StandardCopyOption.ATOMIC_MOVE
import java.nio.file.StandardOpenOption.APPEND
import java.nio.file.StandardOpenOption.CREATE
import java.nio.file.attribute.FileTime

private const val MAX_BUNDLES = 3
private const val MANIFEST = "manifest.json"

/**
 * What was downloaded, by SHA-256: `bundles/SHA/` (the last three used), `models/SHA` (the last task's vectors), and
 * `partial/SHA`, a content that is still arriving, which goes on from the file's length.
 *
 * A content is checked against its SHA-256 when it has arrived, and again when a process first uses it. So nothing is
 * synced.
 */
class Contents(private val root: Path) {
    /** Files that were checked since the process began. */
    private val intact: MutableSet<Path> = HashSet()

    init {
        for (folder in listOf("bundles", "models", "partial")) Files.createDirectories(root.resolve(folder))
    }

    fun bundle(sha256: String): Path = root.resolve("bundles").resolve(sha256)

    fun vector(sha256: String): ByteArray = Files.readAllBytes(root.resolve("models").resolve(sha256))

    /** The vectors that later ones may come as differences from. */
    fun models(): List<String> =
        filesIn(root.resolve("models")).map { it.fileName.toString() }.sorted().take(MAX_VECTORS)

    /**
     * Return what the task needs and the device lacks, the manifest first: only the manifest names the other files.
     *
     * Marks the bundle as used last, and deletes what neither this task nor one of the last bundles needs. Throws
     * BundleException on a manifest that this version cannot read.
     */
    fun lacking(task: Message): List<Wanted> {
        val hash = task["bundle"] as String? ?: return emptyList()
        val vectors = task["vectors"].objects()
        makeRoom(hash, vectors)
        val folder = "bundles/$hash"
        val wanted = mutableListOf(Wanted(hash, MANIFEST, "$folder/$MANIFEST", null, MAX_MANIFEST_BYTES.toLong()))
        if (has(wanted[0])) {
            val manifest = readManifest(Files.readAllBytes(root.resolve(wanted[0].place)))
            for (path in manifest.needed) {
                val file = manifest.files.getValue(path)
                wanted += Wanted(file.sha256, path, "$folder/$path", file.size, file.size)
            }
        }
        for (row in vectors) {
            val size = row["size"] as Long
            wanted += Wanted(row["sha256"] as String, "the ${row["name"]}", "models/${row["sha256"]}", size, size)
        }
        // two vectors may be the same, such as zeros
        val lacking = wanted.distinctBy { it.place }.filterNot { has(it) || copied(it) }
        return resumed(lacking.map { smaller(it, vectors) })
    }

    /** Keep the next bytes of a partial content; `offset` 0 begins it again. */
    fun append(wanted: Wanted, offset: Long, payload: ByteArray) {
        val path = partial(wanted)
        if (offset == 0L) Files.write(path, payload) else Files.write(path, payload, CREATE, APPEND)
    }

    /** Put a complete content, or the vector that a difference gives, in its place. Deletes it and returns false where
     * the SHA-256 is wrong. */
    fun finish(wanted: Wanted): Boolean {
        val (source, target) = partial(wanted) to root.resolve(wanted.place)
        var content = readIfThere(source) ?: ByteArray(0) // a content without bytes comes in no chunk
        val good = sha256(content) == wanted.sha256 && (wanted.base == null || try {
            content = applyDelta(vector(wanted.base), content)
            wanted.place == "models/${sha256(content)}"
        } catch (_: ProtocolException) {
            false
        })
        if (good) {
            if (wanted.base != null || !Files.exists(source)) Files.write(source, content)
            Files.createDirectories(target.parent)
            Files.move(source, target, ATOMIC_MOVE)
            intact.add(target)
        } else {
            Files.deleteIfExists(source)
        }
        return good
    }

    /** Check a bundle's files again when they are needed next: it could not be used. */
    fun recheck(sha256: String) {
        intact.removeAll { it.startsWith(bundle(sha256)) }
    }

    private fun partial(wanted: Wanted): Path = root.resolve("partial").resolve(wanted.sha256)

    private fun has(wanted: Wanted): Boolean {
        val path = root.resolve(wanted.place)
        if (path in intact && Files.exists(path)) return true
        val content = readIfThere(path) ?: return false
        if (sha256(content) != wanted.sha256) {
            Files.delete(path)
            return false
        }
        intact.add(path)
        return true
    }

    /** Take a file from another bundle that has the same one. */
    private fun copied(wanted: Wanted): Boolean {
        val target = root.resolve(wanted.place)
        for (folder in bundlesByUse()) {
            val manifest = try {
                readManifest(Files.readAllBytes(folder.resolve(MANIFEST)))
            } catch (_: Exception) {
                continue // not fetched yet, damaged, or of a newer version
            }
            val paths = manifest.files.filterValues { it.sha256 == wanted.sha256 }.keys.map(folder::resolve)
            val content = paths.firstNotNullOfOrNull(::readIfThere) ?: continue
            if (sha256(content) != wanted.sha256) continue
            Files.createDirectories(target.parent)
            Files.move(Files.write(partial(wanted), content), target, ATOMIC_MOVE)
            intact.add(target)
            return true
        }
        return false
    }

    /** Return the difference that gives this content, if there is one, and the device has what it differs from. */
    private fun smaller(wanted: Wanted, vectors: List<Map<String, Any?>>): Wanted {
        val delta = vectors.firstOrNull { wanted.place == "models/${it["sha256"]}" }?.get("delta") as Map<*, *>?
        val base = delta?.get("base") as String? ?: return wanted
        if (!has(Wanted(base, "the earlier model", "models/$base", null, 0))) return wanted
        val (sha256, size) = delta["sha256"] as String to delta["size"] as Long
        return Wanted(sha256, "the difference of ${wanted.name}", wanted.place, size, size, 0, base, wanted)
    }

    /** Return `lacking` with the bytes that arrived before; delete the partial contents that are not in it. */
    private fun resumed(lacking: List<Wanted>): List<Wanted> {
        val names = lacking.map { it.sha256 }.toSet()
        val have = HashMap<String, Long>()
        for (path in filesIn(root.resolve("partial"))) {
            val name = path.fileName.toString()
            if (name in names) have[name] = Files.size(path) else Files.delete(path)
        }
        return lacking.map { wanted -> wanted.copy(have = have[wanted.sha256]?.takeIf { it <= wanted.limit } ?: 0) }
    }

    private fun makeRoom(hash: String, vectors: List<Map<String, Any?>>) {
        Files.createDirectories(bundle(hash))
        // The folder's time says when the bundle was last used.
        Files.setLastModifiedTime(bundle(hash), FileTime.fromMillis(System.currentTimeMillis()))
        for (old in bundlesByUse().drop(MAX_BUNDLES)) {
            old.toFile().deleteRecursively()
            intact.removeAll { it.startsWith(old) }
        }
        val needed = vectors.flatMap { listOf(it["sha256"], (it["delta"] as Map<*, *>?)?.get("base")) }
        for (path in filesIn(root.resolve("models"))) {
            if (path.fileName.toString() in needed) continue
            Files.delete(path)
            intact.remove(path)
        }
    }

    private fun bundlesByUse(): List<Path> =
        filesIn(root.resolve("bundles")).sortedByDescending { Files.getLastModifiedTime(it) }
}
