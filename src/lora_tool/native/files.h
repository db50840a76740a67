/* Rows that go from file to file in one call. What the system refuses, and what is not finite, ends it early: whoever calls
 * does the rest in another way, which is told why, or says what is wrong. */

/* A write of 1 MB takes two thirds of the time of sixteen of 64 KB. But Linux may take memory for it that nothing has
 * touched yet while it still has smaller pieces of other memory, and on a virtual machine the first touch costs seconds per
 * GB. So small writes follow a large one that took long. */
#define SMALL_WRITE (1 << 16)
#define SMALL_WRITES (64 << 20) /* bytes that are written so, by all threads together */
#define SLOW 1                  /* ns of CPU per byte */
static _Atomic int32_t small_left;

static int64_t cpu_ns(void) {
    struct timespec used;
    return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) ? 0 : (int64_t)used.tv_sec * 1000000000 + used.tv_nsec;
}

/* Write `count` bytes to the open `file` at `offset`, `most` at a time; return how many were written before the system
 * refused, or was interrupted. */
EXPORT int64_t lora_tool_write(int file, const char *bytes, int64_t count, int64_t offset, int64_t most) {
    int64_t done = 0;
    while (done < count) {
        const int64_t some = least_of(count - done, small_left > 0 ? least_of(most, SMALL_WRITE) : most);
        const int64_t before = some > SMALL_WRITE ? cpu_ns() : 0;
        int64_t now = pwrite(file, bytes + done, (size_t)some, offset + done);
        if (now <= 0) {
            break;
        }
        if (some > SMALL_WRITE) {
            if (cpu_ns() - before > now * SLOW) {
                small_left = SMALL_WRITES;
            }
        } else if (small_left > 0) {
            small_left -= (int32_t)now;
        }
        done += now;
    }
    return done;
}

/* Return whether all of `count` bytes of the open `file` could be read from `offset`. */
static int read_whole(int file, char *bytes, int64_t count, int64_t offset) {
    for (int64_t done = 0, now; done < count; done += now) {
        now = pread(file, bytes + done, (size_t)(count - done), offset + done);
        if (now <= 0) {
            return 0;
        }
    }
    return 1;
}

/* Rows of W in an open file, numbers or codes, and where their results go in another. */
struct passage {
    int64_t from, to; /* where in the files the first row begins, and its result */
    int64_t rows, columns;
    int64_t block; /* rows that are in memory together: all, or whole tiles */
    int64_t some;  /* bytes of a write */
    void *read, *made; /* memory of a block and of its results: the same, if both types are of one size */
    const struct codes *codes; /* of all rows, but that their bytes are read; null where rows are numbers */
    const struct storing *storing; /* null where results are numbers */
    int32_t source, out;           /* descriptors */
    int32_t source_type, out_type;
};

/* Read, merge as `lora_tool_merge` and `lora_tool_merge_codes` do, and write; without terms W itself. Where codes are
 * stored again, a block is whole rows of tiles, the first has all rows that are kept as numbers, and results are written
 * over what was read. Return how many rows were
 * written before the system refused, or a result was NaN or infinite. */
EXPORT int64_t lora_tool_pass(int level, const struct passage *passage, const struct term *terms, int64_t count) {
    const struct words *words = words_of(level);
    const int in = passage->codes ? passage->codes->type : passage->source_type;
    const int out = passage->storing ? F32 : passage->out_type;
    if (!words || !is_type(in) || !is_type(out)) {
        return 0;
    }
    if (passage->storing && (!passage->codes || !can_be_stored(passage->codes, count))) {
        return 0;
    }
    struct codes codes = {0};
    if (passage->codes) {
        codes = *passage->codes;
        codes.bytes = passage->read;
    }
    struct storing storing = {0};
    if (passage->storing) {
        storing = *passage->storing;
    }
    const int64_t columns = passage->columns;
    const int64_t stored = passage->codes ? codes.stride : columns * (int64_t)size_of(in);
    const int64_t made = passage->storing ? stored : columns * (int64_t)size_of(out);
    const struct weight weight = {
        .source = passage->read, .codes = passage->codes ? &codes : 0, .type = in, .columns = columns};
    mode_type before = ieee_mode();
    int64_t done = 0;
    while (done < passage->rows) {
        const int64_t rows = least_of(passage->block, passage->rows - done);
        if (!read_whole(passage->source, passage->read, rows * stored, passage->from + done * stored)) {
            break;
        }
        uint32_t largest;
        if (passage->storing) {
            largest = stored_again(words, &codes, &storing, passage->made, rows, columns, done, terms, count);
            const int64_t scales = rows / codes.tall * codes.apart;
            codes.scales += scales;
            storing.raised += scales;
            storing.kept = 0;
        } else {
            largest = count           ? merged(words, &weight, passage->made, out, rows, done, terms, count)
                      : passage->codes ? decoded(words, &codes, passage->made, out, rows, columns)
                                       : words->convert[in][out](passage->read, passage->made, rows * columns);
            codes.above += rows;
        }
        if (largest >= too_large[out] ||
            lora_tool_write(passage->out, passage->made, rows * made, passage->to + done * made, passage->some) <
                rows * made) {
            break;
        }
        done += rows;
    }
    restore_mode(before);
    return done;
}

/* Read `bytes` of the open `file` from `offset`, elements of `width` bytes, and write to `seen` the bits of the first, the
 * largest bits under the mask, and the bits in which one differs from the first. Return whether all could be read. */
EXPORT int lora_tool_scan(int level, int file, int64_t offset, int64_t bytes, int width, uint64_t mask, uint64_t *seen) {
    const struct words *words = words_of(level);
    _Alignas(64) char block[1 << 16];
    seen[0] = seen[1] = seen[2] = 0;
    for (int64_t done = 0; done < bytes; done += (int64_t)sizeof block) {
        const int64_t some = least_of(bytes - done, (int64_t)sizeof block);
        if (!words || !read_whole(file, block, some, offset + done)) {
            return 0;
        }
        if (!done) {
            memcpy(seen, block, (size_t)width);
        }
        words->scan[width == 8 ? 3 : width / 2](block, some / width, mask, seen);
    }
    return 1;
}
