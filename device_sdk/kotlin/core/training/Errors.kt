package fleetlearn.training

/** A task that ends without an update; `code` as in `failed.code`. */
class TrainingException(val code: String, text: String) : Exception(text) {
    /** Every other task would fail too. */
    val endsDevice get() = code == "bad-data" || code == "disk-full"
}

/** Training was stopped. */
class StoppedException : Exception("training was stopped")
