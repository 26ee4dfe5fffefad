/* A caching allocator for CPU tensors, in size classes. */

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>

#include <pthread.h>

namespace {

constexpr size_t LINE = 64;       /* bytes; as torch aligns tensors */
constexpr size_t STEPS = 8;       /* size classes per power of two: blocks are at most an eighth too large */
constexpr size_t SIZES = 64 * STEPS;
constexpr size_t MOST = PTRDIFF_MAX / 2; /* bytes; torch raises for more */

/* Header in the line before a tensor's data. */
struct block {
    volatile uintptr_t mark; /* identifies our blocks; volatile, or stores before free are optimised away */
    block *next;
    size_t size; /* size class */
};

std::mutex lock;
block *kept[SIZES];
size_t kept_bytes, most_bytes; /* a limit of 0 disables the cache */
c10::Allocator *before;        /* torch's own */

size_t size_of(size_t bytes) {
    size_t lines = (bytes + LINE - 1) / LINE;
    if (lines < 2 * STEPS) return lines;
    size_t shift = 63 - __builtin_clzll(lines - 1) - __builtin_ctzll(STEPS);
    return STEPS * shift + ((lines - 1) >> shift) + 1;
}

size_t bytes_of(size_t size) {
    if (size < 2 * STEPS) return size * LINE;
    size_t shift = (size - 1) / STEPS - 1;
    return ((size - STEPS * shift) << shift) * LINE;
}

uintptr_t mark_of(const block *one) { return ~reinterpret_cast<uintptr_t>(one); }

void let_go() {
    for (block *&first : kept)
        while (block *one = first) {
            first = one->next;
            one->mark = 0;
            std::free(one);
        }
    kept_bytes = 0;
}

block *find(size_t size) {
    if (block *one = kept[size]) {
        kept[size] = one->next;
        kept_bytes -= bytes_of(size);
        return one;
    }
    size_t bytes = LINE + bytes_of(size);
    block *one = static_cast<block *>(std::aligned_alloc(LINE, bytes));
    if (!one && kept_bytes) {
        let_go();
        one = static_cast<block *>(std::aligned_alloc(LINE, bytes));
    }
    if (!one) return nullptr;
    one->mark = mark_of(one);
    one->size = size;
    return one;
}

void give_back(void *numbers) {
    if (!numbers) return;
    block *one = reinterpret_cast<block *>(static_cast<char *>(numbers) - LINE);
    if (one->mark != mark_of(one)) return before->raw_deleter()(numbers); /* allocated by torch's allocator */
    std::lock_guard<std::mutex> held(lock);
    size_t bytes = bytes_of(one->size);
    if (kept_bytes + bytes > most_bytes) let_go(); /* also drops sizes no longer in use */
    if (bytes > most_bytes) {
        one->mark = 0;
        std::free(one);
        return;
    }
    one->next = kept[one->size];
    kept[one->size] = one;
    kept_bytes += bytes;
}

struct Keeping final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        char *numbers = nullptr;
        if (bytes && bytes <= MOST) {
            std::lock_guard<std::mutex> held(lock);
            if (block *one = find(size_of(bytes))) numbers = reinterpret_cast<char *>(one) + LINE;
        }
        if (bytes && !numbers) return before->allocate(bytes); /* raises torch's own error */
        return {numbers, numbers, &give_back, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

} // namespace

/* Limit the cache to this many bytes; 0 releases all. Returns the cached bytes. */
extern "C" size_t keep(size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (!before && bytes) {
        pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });
        before = c10::GetCPUAllocator();
        c10::SetCPUAllocator(new Keeping, 0);
    }
    most_bytes = bytes;
    if (!bytes) let_go();
    return kept_bytes;
}
