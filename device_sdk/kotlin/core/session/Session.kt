package fleetlearn.session

import fleetlearn.protocol.CHUNK_BYTES
import fleetlearn.protocol.EXCHANGE_KINDS
import fleetlearn.protocol.FAMILIES
import fleetlearn.protocol.Message
import fleetlearn.protocol.OLDEST_PROTOCOL_VERSION
import fleetlearn.protocol.PROTOCOL_VERSION
import fleetlearn.protocol.ProtocolException
import fleetlearn.protocol.clip
import fleetlearn.protocol.message
import fleetlearn.protocol.objects
import fleetlearn.protocol.readFromCoordinator
import fleetlearn.protocol.signedBytes
import fleetlearn.protocol.unpackChunk
import fleetlearn.session.Command.Note
import fleetlearn.session.Command.Send

/** Seconds to wait for an answer to a check-in, a fetch or a finished upload before the connection is closed. */
const val PATIENCE = 60.0

/** Heartbeats are sent at this part of the interval that the coordinator allows. */
private const val BEAT = 0.8

/** Part of the deadline that is kept for the upload, and the most seconds it can be. */
private const val UPLOAD_PART = 0.1
private const val UPLOAD_MOST = 60.0

/** Seconds, about, until the device checks in again with a coordinator that speaks another version of the protocol. */
private const val VERSION_WAIT = 600.0

/** How often one content may arrive for a task: a second time where its SHA-256 was wrong the first time. */
private const val MAX_ARRIVALS = 2

/** Whether the owner of a public key signed these bytes: (key, signature, bytes). */
typealias Verify = (String, String, ByteArray) -> Boolean

/** What a device is, and what it states at each check-in. */
class About(
    val device: String,
    val examples: Int,
    val software: String,
    /** Public keys: the device does only what one of them signed. Empty: it does any task. */
    val trusted: List<String> = emptyList(),
    val verify: Verify = { _, _, _ -> false },
    /** Whether the session ends when the coordinator says that the training is finished. */
    val untilFinished: Boolean = false,
)

/**
 * The device's side of the conversation, without I/O: events in, commands out.
 *
 * It opens no socket and no file, starts no thread, reads no clock and draws no random number. Its owner tells it
 * what happened, and carries out the commands with which it answers, in order. Times are seconds on any clock that
 * never goes back. Work outlives the connection: training goes on while the device is offline, and what is finished
 * is reported later.
 */
class Session(private val about: About, held: Message?) {
    var link: Link = Link.Offline
        private set
    var work: Work = if (held == null) Work.Idle else Work.Holding(held, false)
        private set
    var trusted: List<String> = about.trusted
        private set

    /** The task whose training or saving has not ended, wanted or not. There is never a second. */
    var runningTask: String? = null
        private set

    /** Failed tasks and broken protocol since the last accepted update. */
    var faults = 0
        private set
    var accepted = 0
        private set
    var stopping = false
        private set

    /** Why the device cannot go on at all. */
    var error: Exception? = null
        private set
    private var steps = 0L
    private var lastProgress = 0.0

    /** The task that ended on this connection, or whose failure is not sent yet. It is not begun again. */
    private var endedTask: String? = null
    private var unsentFailure: Message? = null
    private var challenge = ""

    val task: String? get() = work.task
    val over: Boolean get() = stopping && link is Link.Offline && runningTask == null

    // The connection

    /** The connection is open. `challenge`: 32 random bytes in hexadecimal, where the device trusts keys. */
    fun connected(now: Double, stated: Map<String, Any?> = emptyMap(), challenge: String? = null): List<Command> {
        link = Link.CheckingIn
        lastProgress = now
        this.challenge = challenge ?: ""
        if (stopping) return close("stopping")
        val held = (work as? Work.Finished)?.report?.let { mapOf("task" to it["task"], "round" to it["round"]) }
        val fields = mapOf(
            "protocol" to OLDEST_PROTOCOL_VERSION, "newest_protocol" to PROTOCOL_VERSION, "device" to about.device,
            "examples" to about.examples.toLong(), "software" to about.software, "held" to held,
            "exchanges" to EXCHANGE_KINDS.keys.toList(), "encodings" to FAMILIES, "trusts" to trusted,
            "challenge" to challenge, "privacy" to PRIVACY,
        )
        return listOf(Send(Message("check-in", fields + stated)))
    }

    /** The connection is gone, or could not be opened. */
    fun disconnected(): List<Command> {
        interruptTransfer()
        link = Link.Offline
        endedTask = unsentFailure?.task
        return emptyList()
    }

    /** A text frame arrived. */
    fun received(frame: String, now: Double): List<Command> = guarded(now) { handle(readFromCoordinator(frame), now) }

    /** A binary frame arrived. */
    fun receivedChunk(frame: ByteArray, now: Double): List<Command> = guarded(now) {
        if (link is Link.CheckingIn) throw ProtocolException("out-of-turn", "a chunk came before the welcome")
        val chunk = unpackChunk(frame)
        val fetching = work as? Work.Fetching
        if (fetching?.content == null || chunk.transfer != fetching.content["transfer"]) {
            return@guarded emptyList() // the rest of an earlier fetch, whose task was cancelled
        }
        val wanted = fetching.wanted.first()
        val size = fetching.content.long("size")
        val end = chunk.offset + chunk.payload.size
        if (chunk.offset != fetching.end) {
            val text = "a chunk of ${wanted.name} begins at ${chunk.offset}; expected ${fetching.end}"
            throw ProtocolException("wrong-offset", text)
        }
        if (end > size) throw ProtocolException("wrong-length", "a chunk of ${wanted.name} ends behind its $size bytes")
        work = fetching.copy(end = end)
        val store = Command.StoreChunk(wanted, chunk.offset, chunk.payload)
        if (end == size) listOf(store) + store(fetching, fetching.wanted) else listOf(store)
    }

    private fun guarded(now: Double, handle: () -> List<Command>): List<Command> {
        if (link is Link.Offline || link is Link.Closing) return emptyList()
        lastProgress = now
        return try {
            handle()
        } catch (error: ProtocolException) {
            closeForFault("the coordinator broke the protocol: ${error.message}", 1002)
        }
    }

    // Answers to commands

    /** What the task lacks was looked up. Its training starts where nothing is lacking. */
    fun located(task: String, lacking: List<Wanted>, now: Double): List<Command> {
        val locating = work as? Work.Locating ?: return emptyList()
        if (locating.task != task) return emptyList()
        if (lacking.isNotEmpty()) return fetch(locating, lacking, now)
        // the training that this task replaced has not ended; its end asks again
        if (runningTask != null) return emptyList()
        val (given, deadline) = locating.assignment
        var seconds = deadline - now - minOf(UPLOAD_PART * given.number("deadline"), UPLOAD_MOST)
        (given["time_budget"] as Double?)?.let { seconds = minOf(seconds, it) }
        if (seconds <= 0) {
            return failTask("out-of-time", "the bundle and the model came too late to train before the deadline")
        }
        work = Work.Training(locating.assignment)
        runningTask = task
        steps = 0
        return listOf(Command.StartWork(given, seconds))
    }

    /** The task's bundle cannot be used here. */
    fun unusable(task: String, text: String, code: String = "bad-bundle"): List<Command> =
        if (work is Work.Locating && this.task == task) failTask(code, text) else emptyList()

    /** A complete content was filed (`good`), or deleted because its hash was another. */
    fun stored(sha256: String, good: Boolean, now: Double): List<Command> {
        val storing = work as? Work.Storing ?: return emptyList()
        val wanted = storing.wanted.first()
        if (wanted.sha256 != sha256) return emptyList()
        val rest = storing.wanted.drop(1)
        if (!good) {
            val text = if (wanted.instead != null) "${wanted.name} does not give the vector that it should"
            else "${wanted.name} arrived with another SHA-256 than $sha256"
            val again = wanted.instead ?: wanted.copy(have = 0)
            return listOf(Note(text, true)) + fetch(storing, listOf(again) + rest, now)
        }
        if (rest.isNotEmpty()) return fetch(storing, rest, now)
        work = Work.Locating(storing.assignment)
        return locate()
    }

    /** Training ended well; `report` describes its update. */
    fun trained(report: Message): List<Command> {
        if (work !is Work.Training || task != report.task) return ended(report.text("task"))
        work = Work.Saving(report)
        return listOf(Command.SaveUpdate(report))
    }

    /** The question is answered. */
    fun answered(reply: Message): List<Command> {
        if (work !is Work.Training || task != reply.task) return ended(reply.text("task"))
        work = Work.Answered(reply)
        runningTask = null
        return sendIfOnline(reply)
    }

    /** The update is durable. Only now may it be reported. */
    fun saved(task: String): List<Command> {
        runningTask = null
        val saving = work as? Work.Saving
        if (saving == null || saving.task != task) return listOf(Command.DropUpdate(task)) + locate()
        work = Work.Holding(saving.report, false)
        return sendIfOnline(saving.report)
    }

    /** Training or saving ended without an update: it was stopped (`code` null) or failed. */
    fun ended(task: String, code: String? = null, text: String = ""): List<Command> {
        runningTask = null
        if ((work !is Work.Training && work !is Work.Saving) || this.task != task) return locate()
        return failTask(code ?: "stopping", text)
    }

    /** All chunks of the upload under this transfer number were sent. */
    fun updateSent(transfer: Long, now: Double): List<Command> {
        val uploading = work as? Work.Uploading ?: return emptyList()
        if (transfer != uploading.transfer) return emptyList()
        work = Work.Sent(uploading.report, uploading.reportedAgain, transfer)
        lastProgress = now
        return listOf(Send(message("uploaded", "task" to uploading.task)))
    }

    // Time and the owner

    /** When `tick` is wanted. null: not before something happens. */
    fun due(): Double? = listOfNotNull(
        (link as? Link.Online)?.nextHeartbeat,
        if (awaitsAnswer()) lastProgress + PATIENCE else null,
        waiting()?.assignment?.deadline,
    ).minOrNull()

    /** Time passed; `steps` is how far training is: batches evaluated, and steps. */
    fun tick(now: Double, steps: Long = 0): List<Command> {
        this.steps = if (work is Work.Idle || waiting() != null || work is Work.Storing) 0 else steps
        if (waiting().let { it != null && now >= it.assignment.deadline }) {
            return failTask("out-of-time", "the deadline passed before training began")
        }
        if (awaitsAnswer() && now >= lastProgress + PATIENCE) return close("no answer for $PATIENCE s")
        val online = link as? Link.Online
        if (online == null || now < online.nextHeartbeat) return emptyList()
        link = online.copy(nextHeartbeat = now + online.heartbeatInterval)
        return listOf(heartbeat())
    }

    /** The owner wants to end. An unfinished task is given back; a finished update stays saved. */
    fun stop(): List<Command> {
        stopping = true
        val task = (work as? Work.Unfinished)?.task ?: return close("stopping")
        val failed = message("failed", "task" to task, "code" to "stopping", "text" to "the device is stopping")
        return sendIfOnline(failed) + dropTask() + close("stopping")
    }

    /** The device cannot go on at all (its data do not fit, its disk is full): say so and end with `error`. */
    fun abandon(error: Exception, code: String): List<Command> {
        this.error = error
        stopping = true
        if (work is Work.Unfinished || work is Work.Saving) return failTask(code, error.message ?: "$error")
        return close(error.message ?: "$error")
    }

    // Messages

    private fun handle(message: Message, now: Double): List<Command> {
        if (link is Link.CheckingIn && message.type !in listOf("welcome", "come-back", "refused")) {
            throw ProtocolException("out-of-turn", "${message.type} came before the welcome")
        }
        return when (message.type) {
            "welcome" -> welcome(message, now)
            "come-back" -> comeBack(message)
            "task", "question" ->
                if (trusted.isEmpty()) assign(message, now)
                else distrust(message, "it is not signed, and this device does only what is")
            "signed" -> open(message, now)
            "content" -> receive(message)
            "grant" -> upload(message)
            "waiting" -> wait(message)
            "weighing" -> ignored(message) // this SDK masks no update
            "accepted" -> accept(message)
            "cancel" ->
                if (message.task != task) ignored(message)
                else listOf(Note("task $task is cancelled: ${message["text"]} [${message["code"]}]", false)) +
                    dropTask()
            "refused" -> refused(message, now)
            else -> throw ProtocolException("out-of-turn", "keys to trust came without a signature")
        }
    }

    private fun welcome(message: Message, now: Double): List<Command> {
        if (link is Link.Online) return listOf(Note("a second welcome is ignored", false))
        val version = message.long("protocol")
        if (version !in OLDEST_PROTOCOL_VERSION..PROTOCOL_VERSION) {
            val text = "the coordinator chose version $version of the protocol; this device speaks " +
                "$OLDEST_PROTOCOL_VERSION to $PROTOCOL_VERSION"
            throw ProtocolException("bad-version", text)
        }
        val interval = maxOf(BEAT * message.number("heartbeat"), 0.01)
        link = Link.Online(interval, now + interval, minOf(message.long("chunk_bytes").toInt(), CHUNK_BYTES))
        val checkedIn = "checked in with ${message["coordinator"]} as ${about.device}"
        val commands = mutableListOf<Command>(Note(checkedIn, false))
        if (message.text("ineligible") != "") {
            commands += Note("there will be no task for this device: ${message["ineligible"]}", true)
        }
        unsentFailure?.let { commands += Send(it) }
        unsentFailure = null
        when (val work = work) {
            is Work.Holding -> commands += Send(work.report)
            is Work.Answered -> commands += Send(work.message)
            is Work.Idle -> {}
            else -> commands += heartbeat() // so that the lease is known to be alive
        }
        return commands + locate()
    }

    private fun comeBack(message: Message): List<Command> {
        val (after, reason) = message.number("after") to message.text("reason")
        if (reason == "finished" && about.untilFinished) {
            stopping = true
            return dropUnfinishedTask() + close("the training is finished", after)
        }
        return close("told to come back in $after s ($reason)", after)
    }

    /** Do what a signed message says, if its signature is good. */
    private fun open(signed: Message, now: Double): List<Command> {
        if (trusted.isEmpty()) {
            val text = "a signed message came, and this device has no keys to check it with"
            throw ProtocolException("out-of-turn", text)
        }
        val message = readFromCoordinator(signed.text("message"))
        if (message.type !in listOf("task", "question", "trust")) {
            throw ProtocolException("out-of-turn", "a message was signed that is no task, question or trust")
        }
        val key = signed.text("key")
        val content = signedBytes(challenge, about.device, signed.text("message"))
        val why = when {
            key !in trusted -> "it is signed with the key $key; this device trusts ${trusted.joinToString()}"
            !about.verify(key, signed.text("signature"), content) ->
                "its signature is wrong: it was changed on the way, or signed for another device or at another time"
            else -> null
        }
        if (message.type != "trust") return if (why == null) assign(message, now) else distrust(message, why)
        if (why != null) return closeForFault("new keys to trust are refused: $why")
        trusted = message.list("keys").map { it as String }
        val text = "the coordinator's keys are now ${trusted.joinToString()}"
        return listOf(Note(text, false), Command.SaveTrusted(trusted))
    }

    /** Give back a task that is not to be believed. What the device works on stays as it is. */
    private fun distrust(given: Message, why: String): List<Command> {
        val text = clip("task ${given.task} is not trained: $why")
        val failed = message("failed", "task" to given.task, "code" to "untrusted", "text" to text)
        // nobody shall end the real task of this name
        val named = given.task == task || given.task == endedTask
        return listOf(Note(text, true)) + (if (named) emptyList() else listOf(Send(failed))) +
            closeForFault("a task is not trusted")
    }

    private fun assign(given: Message, now: Double): List<Command> {
        val deadline = now + given.number("deadline")
        val name = given.text("task")
        if (name == task || name == endedTask) {
            val unfinished = work as? Work.Unfinished
            if (unfinished != null && name == task) {
                // A coordinator that was restarted gives the round its time again.
                work = unfinished.with(unfinished.assignment.copy(deadline = deadline))
            }
            return listOf(Note("task $name was given again; the device has it", false))
        }
        val commands = mutableListOf<Command>()
        if (task != null) {
            // A coordinator that gives another task no longer waits for the first (it lost it in a restart).
            commands += Note("task $task is dropped for task $name", true)
            commands += dropTask()
        }
        work = Work.Locating(Assignment(given, deadline))
        commands += Note("task $name: ${given["deadline"]} s to the deadline", false)
        val lacking = unsupported(given)
        return commands + if (lacking == null) locate() else failTask("unsupported", lacking)
    }

    /** Expect the chunks of the content that was asked for. */
    private fun receive(content: Message): List<Command> {
        val fetching = work as? Work.Fetching
        // The answer to an earlier fetch, whose task was cancelled, may still come; the later fetch replaces it.
        if (fetching == null || content["sha256"] != fetching.wanted.first().sha256) {
            return listOf(Note("content ${content["sha256"]} is not awaited; ignored", false))
        }
        val wanted = fetching.wanted.first()
        val (size, offset) = content.long("size") to content.long("offset")
        if (offset != wanted.have) {
            return listOf(Note("${wanted.name} from byte $offset is ignored; ${wanted.have} was asked for", false))
        }
        if (size > wanted.limit || (wanted.size != null && size != wanted.size)) {
            val expected = wanted.size ?: "at most ${wanted.limit}"
            return failTask("bad-bundle", "${wanted.name} has $size bytes; expected $expected")
        }
        if (offset > size) throw ProtocolException("wrong-offset", "${wanted.name} begins at $offset, behind its end")
        work = fetching.copy(content = content, end = offset)
        return if (offset == size) store(fetching, fetching.wanted) else emptyList()
    }

    /** Send the update from the grant's offset on. */
    private fun upload(grant: Message): List<Command> {
        checkReported(grant)
        val (finished, online) = work as? Work.Finished to link as? Link.Online
        if (finished == null || grant.task != finished.task || online == null) return ignored(grant)
        val (transfer, offset) = grant.long("transfer") to grant.long("offset")
        val under = (finished as? Work.Uploading)?.transfer ?: (finished as? Work.Sent)?.transfer
        if (transfer == under) return listOf(Note("task ${grant.task}: a second grant $transfer is ignored", false))
        val size = finished.report["parts"].objects().sumOf { it["size"] as Long }
        if (offset > size) {
            val text = "the grant for task ${grant.task} begins at $offset; the update has $size bytes"
            throw ProtocolException("wrong-offset", text)
        }
        work = Work.Uploading(finished.report, finished.reportedAgain, transfer)
        val text = "task ${grant.task}: uploading ${size - offset} bytes from $offset"
        return listOf(Note(text, false), Command.SendUpdate(finished.report, transfer, offset, online.chunkBytes))
    }

    /** A transfer lost its turn, or has none yet. For a fetch, the message alone starts the patience again. */
    private fun wait(waiting: Message): List<Command> {
        if (waiting.task == null) return listOf(Note("what is fetched waits for its turn", false))
        val finished = work as? Work.Finished
        if (finished == null || finished is Work.Holding || waiting.task != finished.task) return ignored(waiting)
        // The report comes after the last chunk, so the next grant's offset counts all chunks.
        work = Work.Holding(finished.report, finished.reportedAgain)
        val text = "task ${waiting.task}: the upload waits for its turn"
        return listOf(Note(text, false), Command.StopUpdate, Send(finished.report))
    }

    private fun accept(message: Message): List<Command> {
        checkReported(message)
        if (message.task != task) return ignored(message)
        faults = 0
        if (work is Work.Finished) accepted++
        val what = if (work is Work.Answered) "answer" else "update"
        return listOf(Note("task $task: $what accepted", false)) + dropTask()
    }

    private fun refused(refused: Message, now: Double): List<Command> {
        val (code, sha256) = refused.text("code") to refused["sha256"] as String?
        val said = "${refused["text"]} [$code]"
        return when {
            code == "replaced" && refused.task == null && sha256 == null -> endReplaced(said)
            link is Link.CheckingIn -> checkInRefused(code, refused.text("text"), said)
            sha256 != null -> contentRefused(refused, sha256, said, now)
            refused.task != null -> taskRefused(refused, said)
            else -> closeForFault("something was refused: $said")
        }
    }

    private fun checkInRefused(code: String, text: String, said: String): List<Command> {
        if (code == "bad-version" && !about.untilFinished) {
            // The coordinator may be given another version while nobody is near the device.
            return listOf(Note("the coordinator speaks another version of the protocol: $text", true)) +
                close("another version of the protocol", VERSION_WAIT)
        }
        if (code in listOf("bad-version", "bad-message", "unknown-type", "too-large")) {
            error = ProtocolException(code, "the coordinator refuses the check-in: $text")
            stopping = true
        }
        return closeForFault("the check-in is refused: $said")
    }

    private fun contentRefused(refused: Message, sha256: String, said: String, now: Double): List<Command> {
        val fetching = work as? Work.Fetching
        if (fetching == null || sha256 != fetching.wanted.first().sha256) return ignored(refused)
        val (wanted, others) = fetching.wanted.first() to fetching.wanted.drop(1)
        if (refused["code"] == "wrong-offset" && wanted.have > 0) {
            return listOf(Note("${wanted.name} is fetched from its beginning: $said", true)) +
                fetch(fetching, listOf(wanted.copy(have = 0)) + others, now)
        }
        if (wanted.instead != null) {
            return listOf(Note("${wanted.name} cannot be had, so the whole content is fetched: $said", false)) +
                fetch(fetching, listOf(wanted.instead) + others, now)
        }
        return failTask("bad-bundle", "fetching ${wanted.name} was refused: $said")
    }

    private fun taskRefused(refused: Message, said: String): List<Command> {
        val code = refused.text("code")
        if (refused.task != task || code == "duplicate") return ignored(refused)
        if (code == "busy") return close("task $task: $said")
        val finished = work as? Work.Finished
        if (finished != null && code == "wrong-offset") {
            work = Work.Holding(finished.report, finished.reportedAgain)
            return listOf(Note("task $task waits for another grant: $said", true), Command.StopUpdate)
        }
        if (finished != null && code in listOf("wrong-hash", "wrong-length") && !finished.reportedAgain) {
            work = Work.Holding(finished.report, true)
            return listOf(Note("task $task is reported again: $said", true), Command.StopUpdate, Send(finished.report))
        }
        return listOf(Note("task $task is forgotten: $said", true)) + dropTask()
    }

    /** End the device. This is the session's only connection, so another process speaks for the device, and has its
     * task. The two would replace each other for ever. */
    private fun endReplaced(said: String): List<Command> {
        val text =
            "another process connected to the coordinator as device ${about.device}, so this one ends ($said). Each " +
            "device needs a state directory of its own, which holds its name"
        error = ProtocolException("replaced", text)
        stopping = true
        return dropUnfinishedTask() + close("another process speaks for this device")
    }

    private fun checkReported(message: Message) {
        if (message.task == task && work !is Work.Finished && work !is Work.Answered) {
            throw ProtocolException("out-of-turn", "${message.type} came for task $task, which was not reported")
        }
    }

    // Shared steps

    private fun Work.Unfinished.with(assignment: Assignment): Work.Unfinished = when (this) {
        is Work.Locating -> copy(assignment)
        is Work.Fetching -> copy(assignment)
        is Work.Storing -> copy(assignment)
        is Work.Training -> copy(assignment)
    }

    private fun heartbeat() = Send(message("heartbeat", "task" to task, "steps" to steps))

    /** Look up what is lacking, if that is the task's next step. */
    private fun locate(): List<Command> =
        (work as? Work.Locating)?.let { listOf(Command.Locate(it.assignment.task)) } ?: emptyList()

    /** Ask for the first wanted content. */
    private fun fetch(unfinished: Work.Unfinished, wanted: List<Wanted>, now: Double): List<Command> {
        val (first, assignment) = wanted.first() to unfinished.assignment
        if (assignment.arrived.count { it == first.place } >= MAX_ARRIVALS) {
            return failTask("bad-bundle", "${first.name} arrived twice with another SHA-256 than its name")
        }
        if (first.have == first.size) return store(unfinished, wanted)
        if (link !is Link.Online) {
            work = Work.Locating(assignment) // the next welcome asks again
            return emptyList()
        }
        work = Work.Fetching(assignment, wanted)
        lastProgress = now
        val text = "fetching ${first.name} (${first.sha256.take(12)}) from byte ${first.have} of ${first.size ?: "?"}"
        return listOf(Note(text, false), Send(message("fetch", "sha256" to first.sha256, "offset" to first.have)))
    }

    /** Have the first wanted content checked, all of whose bytes are there. */
    private fun store(unfinished: Work.Unfinished, wanted: List<Wanted>): List<Command> {
        val assignment = unfinished.assignment
        work = Work.Storing(assignment.copy(arrived = assignment.arrived + wanted.first().place), wanted)
        return listOf(Command.FinishContent(wanted.first()))
    }

    /** End the current task, whatever its state. */
    private fun dropTask(): List<Command> {
        val before = work
        endedTask = task
        work = Work.Idle
        // Training that has ended by itself needs no stop. An update being saved is dropped by `saved`.
        if (before is Work.Training && runningTask != null) return listOf(Command.StopWork)
        return if (before is Work.Finished) listOf(Command.DropUpdate(before.task)) else emptyList()
    }

    private fun dropUnfinishedTask(): List<Command> = if (work is Work.Unfinished) dropTask() else emptyList()

    /** Give the task back to the coordinator, now or with the next welcome. */
    private fun failTask(code: String, said: String): List<Command> {
        val failed = message("failed", "task" to task, "code" to code, "text" to clip(said))
        val sent = sendIfOnline(failed)
        unsentFailure = if (sent.isEmpty()) failed else null
        val text = "task $task failed: $said [$code]"
        return listOf(Note(text, true)) + sent + dropTask() + closeForFault("task ${failed.task} failed")
    }

    private fun sendIfOnline(message: Message): List<Command> =
        if (link is Link.Online) listOf(Send(message)) else emptyList()

    private fun closeForFault(reason: String, code: Int = 1000): List<Command> {
        faults++
        return close(reason, null, code)
    }

    private fun close(reason: String, after: Double? = null, code: Int = 1000): List<Command> {
        if (link is Link.Offline || link is Link.Closing) return emptyList()
        interruptTransfer()
        link = Link.Closing
        return listOf(Command.Close(reason, after, code))
    }

    /** Go back to where the next connection begins: a fetch at its partial content, an upload at its report. */
    private fun interruptTransfer() {
        when (val before = work) {
            is Work.Fetching -> work = Work.Locating(before.assignment)
            is Work.Finished -> work = Work.Holding(before.report, before.reportedAgain)
            else -> {}
        }
    }

    /** A task that waits for contents. */
    private fun waiting(): Work.Unfinished? = (work as? Work.Unfinished)
        ?.takeIf { it is Work.Locating || it is Work.Fetching }

    private fun awaitsAnswer(): Boolean = link is Link.CheckingIn || work is Work.Fetching || work is Work.Sent

    private fun ignored(message: Message): List<Command> {
        val about = (message.task ?: message["sha256"] ?: "").toString().take(64)
        return listOf(Note("${message.type} about $about is ignored: it is not what the device works on", false))
    }
}
