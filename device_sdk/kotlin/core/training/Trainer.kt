package fleetlearn.training

import fleetlearn.protocol.BundleException
import fleetlearn.protocol.LARGEST
import fleetlearn.protocol.Manifest
import fleetlearn.protocol.Message
import fleetlearn.protocol.ProtocolException
import fleetlearn.protocol.checkFinite
import fleetlearn.protocol.crc32
import fleetlearn.protocol.encode
import fleetlearn.protocol.findEncoding
import fleetlearn.protocol.message
import fleetlearn.protocol.objects
import fleetlearn.storage.Contents
import fleetlearn.storage.FinishedUpdate
import fleetlearn.storage.Outbox
import kotlin.math.abs

/** The device gives a task back after this many processes died during its training. */
private const val MAX_STARTS = 3

/** Most examples evaluated at a time: bounds memory, and changes no sum beyond rounding. */
private const val EVALUATION_BATCH = 256

/** The largest magnitude of a number in the protocol. */
private const val LARGEST_NUMBER = 1e30

/** Carries out a task's training or a question's evaluation, from the state directory to a report, in its caller's
 * thread. */
class Trainer(
    private val contents: Contents,
    private val outbox: Outbox,
    private val columns: Map<String, Column>,
    private val threads: Int = 1,
    /** Seconds on the session's clock. */
    private val clock: () -> Double,
) : AutoCloseable {
    /** Batches of the task that were evaluated, plus steps. */
    @Volatile
    var batches = 0L
        private set

    /** While it is true, training ends before its next batch. */
    @Volatile
    var halt = false
    private var opened: Pair<Bundle, FittedData>? = null

    /** Train for at most `seconds`. Throws TrainingException, StoppedException, ProtocolException (also
     * BundleException). */
    fun train(task: Message, seconds: Double): FinishedUpdate = counted(task) {
        val end = clock() + seconds
        val (bundle, data) = open(task)
        val manifest = bundle.manifest
        checkParts(task, manifest)
        val hyper = hyper(task, manifest)
        val model = model(task)
        bundle.load(model, outbox.kept(bundle.sha256, bundle.keptSize))
        val evaluation = if (task["evaluate"] == true) evaluated(bundle, data, end) else null
        val done = passes(bundle, data, task, hyper, end)
        val local = bundle.runtime.local()
        val places = manifest.buffers.flatMap { range(it.offset, it.elements) }
        val buffers = FloatArray(places.size) { local[places[it]] }
        val update = FloatArray(manifest.size) { local[it] - model[it] }
        places.forEach { update[it] = 0f }
        val kept = bundle.kept(local)
        val vectors = mapOf("update" to update, "buffers" to buffers)
        val clip = task["clip"] as Double?
        var clipped: Boolean? = null
        val parts = (task["parts"] as Map<*, *>).entries.map { (name, encoding) ->
            val content = try {
                checkFinite(kept)
                val (how, vector) = findEncoding(encoding as String) to vectors.getValue(name as String)
                if (name == "update" && clip != null) {
                    encodeClipped(how, vector, task.long("seed"), clip).also { clipped = it.clipped }.content
                } else {
                    how.encode(vector, task.long("seed"))
                }
            } catch (error: ProtocolException) {
                throw diverged(data, error.text)
            }
            val size = content.size.toLong()
            mapOf("name" to name, "encoding" to encoding, "size" to size, "crc32" to crc32(content)) to content
        }
        val report = message(
            "report", "task" to task.task, "round" to task["round"], "parts" to parts.map { it.first },
            "examples" to data.examples.toLong(), "steps" to done.steps, "epochs" to done.epochs,
            "complete" to done.complete, "loss" to done.loss, "metrics" to done.metrics,
            "seconds" to clock() - (end - seconds), "evaluation" to evaluation,
            "clipped" to clipped,
        )
        encode(report) // throws here what the coordinator would refuse
        FinishedUpdate(report, parts.map { it.second }, bundle.sha256, kept)
    }

    /** Work out what is asked: an evaluation, with the device's own parameters if the bundle has any. Throws as
     * `train`. */
    fun answer(question: Message, seconds: Double): Message = counted(question) {
        val begin = clock()
        val (bundle, data) = open(question)
        bundle.load(model(question), outbox.kept(bundle.sha256, bundle.keptSize))
        val content = evaluated(bundle, data, begin + seconds)
        message(
            "reply", "task" to question.task, "kind" to question["kind"], "content" to content,
            "seconds" to clock() - begin,
        ).also(::encode)
    }

    override fun close() {
        opened?.first?.close()
        opened = null
    }

    private class Done(
        val steps: Long,
        val epochs: Double,
        val complete: Boolean,
        val loss: Double,
        val metrics: Map<String, Double>,
    )

    /** Do the passes. A step begins only if one of the mean duration so far would still fit; the first always
     * begins. */
    private fun passes(bundle: Bundle, data: FittedData, task: Message, hyper: Map<String, Double>, end: Double): Done {
        val (epochs, seed) = task.long("epochs") to task.long("seed")
        var (steps, seen) = 0L to 0L
        var lossSum = 0.0
        val metricSums = HashMap<String, Double>()
        val size = task.long("batch_size")
        val planned = epochs * if (size == 0L) 1L else (data.examples + size - 1) / size
        val began = clock()
        for (epoch in 0 until epochs) {
            for (batch in data.batches(task.long("batch_size").toInt(), seed, epoch)) {
                if (steps > 0 && clock() + (clock() - began) / steps > end) {
                    val passes = epoch + (seen - epoch * data.examples).toDouble() / data.examples
                    return Done(steps, passes, false, lossSum / seen, means(metricSums, seen))
                }
                val loss = bundle.runtime.step(batch, seed + steps and LARGEST, at(task, hyper, steps, planned))
                steps++
                seen += batch.examples
                if (!(abs(loss) <= LARGEST_NUMBER)) {
                    throw diverged(data, "step $steps's loss is $loss: a smaller lr may help")
                }
                lossSum += loss * batch.examples
                for ((name, value) in bundle.runtime.metrics) metricSums.merge(name, value * batch.examples,
                    Double::plus)
                counted()
            }
        }
        return Done(steps, epochs.toDouble(), true, lossSum / seen, means(metricSums, seen))
    }

    /** Return the hyper-parameters of a step, with its learning rate. */
    private fun at(task: Message, hyper: Map<String, Double>, step: Long, steps: Long): Map<String, Double> {
        @Suppress("UNCHECKED_CAST")
        val schedule = task["schedule"] as Map<String, Any?>? ?: return hyper
        val lr = hyper["lr"] ?: throw TrainingException(
            "runtime-error", "the learning rate has a schedule, and the bundle's step has no lr",
        )
        return hyper + ("lr" to lr * factorAt(schedule, step, steps))
    }

    /** Return the sums of the loaded model over all data. */
    private fun evaluated(bundle: Bundle, data: FittedData, end: Double): Map<String, Any> {
        var (examples, loss) = 0L to 0.0
        val metrics = bundle.manifest.metrics.associateWith { 0.0 }.toMutableMap()
        for (batch in data.batches(EVALUATION_BATCH, null)) {
            val sums = bundle.runtime.evaluate(batch)
            examples += sums.examples
            loss += sums.loss
            for ((name, value) in sums.metrics) metrics.merge(name, value, Double::plus)
            counted()
            if (clock() > end) {
                throw TrainingException("out-of-time", "the evaluation took longer than the time that was left")
            }
        }
        if (!(abs(loss) <= LARGEST_NUMBER)) throw diverged(data, "the model's summed loss on these data is $loss")
        return mapOf("examples" to examples, "loss_sum" to loss, "metric_sums" to means(metrics, 1))
    }

    /** Count the task's start durably while `act` runs: it may kill the process. */
    private fun <T> counted(task: Message, act: () -> T): T {
        batches = 0
        val name = task.text("task")
        val starts = outbox.starts(name)
        if (starts >= MAX_STARTS) {
            val text = "the task ended the process $starts times, most likely for lack of memory"
            throw TrainingException("killed", text)
        }
        outbox.begin(name)
        try {
            return act()
        } catch (error: BundleException) {
            close()
            contents.recheck(task.text("bundle")) // its files are checked again when they are needed next
            throw error
        } catch (error: OutOfMemoryError) {
            close()
            throw TrainingException("out-of-memory", "the memory is too small for this task: ${error.message}")
        } finally {
            outbox.end()
        }
    }

    private fun counted() {
        batches++
        if (halt) throw StoppedException()
    }

    private fun open(task: Message): Pair<Bundle, FittedData> {
        val sha256 = task.text("bundle")
        opened?.let { if (it.first.sha256 == sha256) return it else close() }
        val bundle = Bundle(sha256, contents.bundle(sha256), threads)
        return (bundle to FittedData(columns, bundle.manifest.batch)).also { opened = it }
    }

    private fun model(task: Message): FloatArray {
        val row = task["vectors"].objects().first { it["name"] == "model" }
        val (manifest, content) = opened!!.first.manifest to contents.vector(row["sha256"] as String)
        return findEncoding(row["encoding"] as String).decode(content, manifest.size)
    }
}

private fun range(offset: Long, elements: Long): IntRange = offset.toInt() until (offset + elements).toInt()

/** Leaves out those that these data do not define (0/0), which must not fail the training. */
private fun means(sums: Map<String, Double>, examples: Long): Map<String, Double> =
    sums.mapValues { it.value / examples }.filterValues { abs(it) <= LARGEST_NUMBER }

/** The data's fault, where they hold a value that is not finite. */
private fun diverged(data: FittedData, text: String): TrainingException =
    data.firstNonfinite()?.let { badData("$it. With it, $text") } ?: TrainingException("diverged", text)

/** A task must ask for the values of buffers, as float32, exactly where the bundle has some. */
private fun checkParts(task: Message, manifest: Manifest) {
    val asked = (task["parts"] as Map<*, *>)["buffers"]
    val expected = if (manifest.buffers.isEmpty()) null else "float32"
    if (asked != expected) {
        val text = "a task of bundle ${manifest.name} asks for the part buffers as $asked; expected $expected"
        throw TrainingException("unsupported", text)
    }
}

private fun hyper(task: Message, manifest: Manifest): Map<String, Double> {
    val given = task["hyper"] as Map<*, *>
    val unknown = given.keys - manifest.hyper.keys
    if (unknown.isNotEmpty()) throw TrainingException("runtime-error", "hyper-parameters $unknown are not the bundle's")
    return manifest.hyper.mapValues { (name, default) ->
        given[name] as Double? ?: default
            ?: throw TrainingException("runtime-error", "the hyper-parameter $name was not given and has no default")
    }
}
