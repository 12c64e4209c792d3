package fleetlearn.driver

import fleetlearn.protocol.BundleException
import fleetlearn.protocol.Message
import fleetlearn.protocol.ProtocolException
import fleetlearn.protocol.encode
import fleetlearn.protocol.hex
import fleetlearn.session.Command
import fleetlearn.session.Link
import fleetlearn.session.Session
import fleetlearn.session.Wanted
import fleetlearn.storage.FinishedUpdate
import fleetlearn.storage.StateDirectory
import fleetlearn.storage.randomBytes
import fleetlearn.training.StoppedException
import fleetlearn.training.Trainer
import fleetlearn.training.TrainingException
import java.io.IOException
import java.util.concurrent.Executors
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit
import kotlin.math.pow
import kotlin.random.Random

/** Longest wait before the first connection after one that was welcomed, which doubles with each failure; and before
 * any. */
class Timing(val base: Double = 0.5, val cap: Double = 60.0)

/** Seconds on a clock that never goes back. */
fun now(): Double = System.nanoTime() / 1e9

private typealias Event = () -> List<Command>

/**
 * One run of a device: carries a session's commands out, one after the other, and tells the session what came of
 * them.
 *
 * Events wait in a queue. The commands with which the session answers an event are carried out before the next event,
 * in the thread of `run`; what takes long is a job in another thread, whose end is an event.
 */
class Driver(
    private val url: String,
    private val session: Session,
    private val directory: StateDirectory,
    private val trainer: Trainer,
    private val transport: Transport,
    private var token: String? = null,
    private val timing: Timing = Timing(),
    private val stated: () -> Map<String, Any?> = { emptyMap() },
    private val log: (text: String, warning: Boolean) -> Unit,
) {
    private val events = LinkedBlockingQueue<Event>()
    private val jobs = Executors.newCachedThreadPool { Thread(it).apply { isDaemon = true } }

    /** Lookups and filings are done one at a time: a lookup deletes what only the task before needed. */
    private val files = Executors.newSingleThreadExecutor { Thread(it).apply { isDaemon = true } }
    private var socket: Socket? = null

    /** The number of the last upload, or of its end: an upload with another number is stopped. */
    @Volatile
    private var upload = 0
    private var finished: FinishedUpdate? = null
    private var failures = 0
    private var welcomed = false
    private var comeBackAfter: Double? = null
    private var connectAt: Double? = 0.0
    private var unexpected: Throwable? = null

    /** End in order, from any thread: an unfinished task is given back, a finished update stays saved. */
    fun stop() = post { session.stop() }

    /** Run until the session is over. Throws its error, and one that nobody expected. */
    fun run() {
        try {
            while (!session.over && unexpected == null) {
                val due = listOfNotNull(session.due(), connectAt?.takeUnless { session.stopping }).minOrNull()
                val wait = if (due == null) Long.MAX_VALUE else maxOf(0.0, 1e9 * (due - now())).toLong()
                val event = events.poll(wait, TimeUnit.NANOSECONDS)
                when {
                    event != null -> carryOut(event())
                    session.due().let { it != null && it <= now() } -> carryOut(session.tick(now(), trainer.batches))
                    connectAt.let { it != null && it <= now() } && !session.stopping -> connect()
                }
            }
        } finally {
            trainer.halt = true
            upload++
            socket?.abort()
            jobs.shutdown()
            files.shutdown()
            jobs.awaitTermination(10, TimeUnit.SECONDS)
        }
        unexpected?.let { throw it }
        session.error?.let { throw it }
    }

    private fun post(event: Event) {
        events.put(event)
    }

    // The connection

    private fun connect() {
        connectAt = null
        comeBackAfter = null
        welcomed = false
        socket = transport.connect(url, directory.headers(token), object : Listener {
            override fun opened() = post {
                log("connected to $url", false)
                token = null // the coordinator knows the credential
                val models = directory.contents.models()
                val challenge = if (session.trusted.isEmpty()) null else hex(randomBytes(32))
                session.connected(now(), stated() + ("models" to models), challenge).also { socket?.request() }
            }

            override fun text(message: String) = frame { session.received(message, now()) }

            override fun binary(message: ByteArray) = frame { session.receivedChunk(message, now()) }

            override fun ended(reason: String, retryAfter: Double) = post {
                session.disconnected().also {
                    socket = null
                    upload++
                    log("the connection ended: $reason", true)
                    again(retryAfter)
                }
            }
        })
    }

    /** The next frame comes when this one's commands were carried out: a slow disk slows the coordinator down. */
    private fun frame(event: Event) {
        post {
            event().also {
                welcomed = welcomed || session.link is Link.Online
                events.put { socket?.request().let { emptyList() } }
            }
        }
    }

    /** Full jitter: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015. */
    private fun again(retryAfter: Double) {
        failures = if (welcomed) 0 else failures + 1
        val most = minOf(timing.cap, timing.base * 2.0.pow(minOf(failures + session.faults, 30)))
        val wait = comeBackAfter?.let { (0.5 + Random.nextDouble()) * it } ?: (Random.nextDouble() * most)
        connectAt = now() + wait + retryAfter
        if (!session.stopping) log("connecting again in %.1f s".format(wait + retryAfter), false)
    }

    // Commands

    private fun carryOut(commands: List<Command>) {
        val queue = ArrayDeque(commands)
        while (queue.isNotEmpty()) {
            try {
                carryOut(queue.removeFirst())
            } catch (error: IOException) {
                if (session.error != null) throw error
                queue.clear()
                queue.addAll(session.abandon(error, "runtime-error"))
            }
        }
    }

    private fun carryOut(command: Command) {
        when (command) {
            is Command.Note -> log(command.text, command.warning)
            is Command.Send -> {
                socket?.send(encode(command.message))
                if (command.message.type == "heartbeat") socket?.ping()
            }
            is Command.StoreChunk -> directory.contents.append(command.wanted, command.offset, command.payload)
            is Command.Locate -> locate(command.task)
            is Command.FinishContent -> finish(command.wanted)
            is Command.StartWork -> {
                trainer.halt = false
                job(command.task.text("task")) { work(command.task, command.seconds) }
            }
            Command.StopWork -> trainer.halt = true
            is Command.SaveUpdate -> job(command.report.text("task")) { save(command.report.text("task")) }
            is Command.DropUpdate -> {
                upload++
                directory.outbox.drop(command.task)
            }
            is Command.SendUpdate -> {
                val number = ++upload
                job(null) { send(command, number) }
            }
            Command.StopUpdate -> upload++
            is Command.SaveTrusted -> directory.trusted = command.keys
            is Command.Close -> {
                log("closing the connection: ${command.reason}", command.after == null && !session.stopping)
                comeBackAfter = command.after
                upload++
                socket?.close(command.code)
            }
        }
    }

    // Jobs

    /** Do this in another thread. `task`: the one that it ends where it fails. */
    private fun job(task: String?, act: () -> Unit) {
        jobs.execute {
            try {
                act()
            } catch (_: StoppedException) {
                post { session.ended(task!!) }
            } catch (error: Exception) {
                fail(task, error)
            } catch (error: Throwable) {
                post { emptyList<Command>().also { unexpected = error } }
            }
        }
    }

    private fun fail(task: String?, error: Exception) {
        val (code, text) = codeOf(error) to (error.message ?: "$error")
        val ends = error is IOException || (error is TrainingException && error.endsDevice)
        if (ends || task == null) {
            post { session.abandon(error, code) + (task?.let { session.ended(it) } ?: emptyList()) }
        } else {
            post { session.ended(task, code, text) }
        }
    }

    private fun codeOf(error: Exception): String = when (error) {
        is TrainingException -> error.code
        is BundleException, is ProtocolException -> "bad-bundle"
        else -> "runtime-error"
    }

    private fun locate(task: Message) = files.execute {
        val name = task.text("task")
        try {
            val lacking = directory.contents.lacking(task)
            post { session.located(name, lacking, now()) }
        } catch (error: ProtocolException) {
            post { session.unusable(name, error.text) }
        } catch (error: Exception) {
            post { session.abandon(error, "runtime-error") }
        }
    }

    private fun finish(wanted: Wanted) = files.execute {
        try {
            val good = directory.contents.finish(wanted)
            post { session.stored(wanted.sha256, good, now()) }
        } catch (error: Exception) {
            post { session.abandon(error, "runtime-error") }
        }
    }

    private fun work(task: Message, seconds: Double) {
        log("task ${task.task}: working on it", false)
        if (task.type == "question") {
            val reply = trainer.answer(task, seconds)
            return post { session.answered(reply) }
        }
        val update = trainer.train(task, seconds)
        val report = update.report
        log("task ${task.task}: trained ${report["steps"]} steps, loss ${report["loss"]}", false)
        post {
            finished = update
            session.trained(report)
        }
    }

    private fun save(task: String) {
        directory.outbox.save(finished!!)
        finished = null
        post { session.saved(task) }
    }

    private fun send(command: Command.SendUpdate, number: Int) {
        for (chunk in directory.outbox.chunks(command.report, command.transfer, command.offset, command.chunkBytes)) {
            if (upload != number || socket?.send(chunk) != true) return
        }
        post { if (upload == number) session.updateSent(command.transfer, now()) else emptyList() }
    }
}
