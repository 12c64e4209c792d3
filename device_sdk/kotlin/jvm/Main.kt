/** A device on the JVM: `java -cp ... fleetlearn.jvm.MainKt --coordinator URL --data FILE.npz --state FOLDER ...` */
package fleetlearn.jvm

import fleetlearn.driver.Driver
import fleetlearn.driver.Timing
import fleetlearn.driver.WebSockets
import fleetlearn.driver.now
import fleetlearn.protocol.fromHex
import fleetlearn.session.About
import fleetlearn.session.Session
import fleetlearn.storage.StateDirectory
import fleetlearn.training.Trainer
import fleetlearn.training.examplesOf
import java.math.BigInteger
import java.nio.file.Path
import java.security.KeyFactory
import java.security.Signature
import java.security.SignatureException
import java.security.spec.EdECPoint
import java.security.spec.EdECPublicKeySpec
import java.security.spec.NamedParameterSpec
import kotlin.system.exitProcess

private const val OPTIONS =
    "--coordinator URL --data FILE.npz --state FOLDER [--name NAME] [--token TOKEN] [--trust KEY]... " +
    "[--base SECONDS] [--until-finished]"

fun main(arguments: Array<String>) {
    val given = HashMap<String, MutableList<String>>()
    val words = arguments.toMutableList()
    while (words.isNotEmpty()) {
        val option = words.removeFirst()
        val values = given.getOrPut(option) { mutableListOf() }
        if (option != "--until-finished") values += words.removeFirstOrNull() ?: usage("$option needs a value")
    }
    fun one(option: String) = given[option]?.single()
    fun needed(option: String) = one(option) ?: usage("$option is missing")
    val data = readNpz(Path.of(needed("--data")))
    val log = { text: String, warning: Boolean -> println("${if (warning) "WARNING" else "INFO"} $text") }
    try {
        StateDirectory(Path.of(needed("--state")), one("--name")).use { directory ->
            val trusted = directory.trusted.ifEmpty { given["--trust"] ?: emptyList() }
            if (trusted.isNotEmpty()) directory.trusted = trusted
            val about = About(
                directory.device, examplesOf(data), "fleetlearn-kotlin", trusted, ::verify, "--until-finished" in given,
            )
            Trainer(directory.contents, directory.outbox, data, clock = ::now).use { trainer ->
                val session = Session(about, directory.outbox.load())
                val timing = Timing(one("--base")?.toDouble() ?: 0.5)
                val driver = Driver(
                    needed("--coordinator"), session, directory, trainer, WebSockets(), one("--token"), timing,
                    log = log,
                )
                Runtime.getRuntime().addShutdownHook(Thread { driver.stop().also { Thread.sleep(STOPPING) } })
                driver.run()
            }
        }
    } catch (error: Exception) {
        println("ERROR $error")
        Runtime.getRuntime().halt(1)
    }
    Runtime.getRuntime().halt(0)
}

/** Milliseconds in which a device that was asked to end can still tell the coordinator. */
private const val STOPPING = 1000L

private fun usage(why: String): Nothing {
    System.err.println("$why; expected $OPTIONS")
    exitProcess(2)
}

/** Return whether the owner of an Ed25519 key signed these bytes. */
fun verify(key: String, signature: String, content: ByteArray): Boolean {
    // RFC 8032: little-endian; the highest bit says whether x is odd
    val bytes = fromHex(key).reversedArray()
    val odd = bytes[0].toInt() and 0x80 != 0
    bytes[0] = (bytes[0].toInt() and 0x7f).toByte()
    val point = EdECPoint(odd, BigInteger(1, bytes))
    return try {
        val spec = EdECPublicKeySpec(NamedParameterSpec.ED25519, point)
        val public = KeyFactory.getInstance("Ed25519").generatePublic(spec)
        Signature.getInstance("Ed25519").run {
            initVerify(public)
            update(content)
            verify(fromHex(signature))
        }
    } catch (_: SignatureException) {
        false
    } catch (_: java.security.GeneralSecurityException) {
        false
    }
}
