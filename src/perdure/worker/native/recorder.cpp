// The compiled recorder: one boxed kernel on dispatch key BackendSelect for every c10d operator.
//
// It notes the collective in the rank's ring (laid out by perdure/model/ring.py, whose constants
// come in as macros) and passes it on below that key, so process groups keep their types and
// their special paths. Python talks to it by the C functions at the end, through ctypes: no
// Python.h, one build serves every Python.
//
// Any thread may be in a kernel. Counters in the ring are moved by atomic operations; no lock is
// taken but where a communicator is seen for the first time. In a forked child, and before a
// ring is attached, the kernel only passes on.
//
// When a collective ended is told by its future, where it has one (gloo); by a Work that stands
// before the real one and stamps `wait` (gloo's reduce_scatter_tensor, send, recv), which also
// tells for how long a thread was blocked; for works on a device by a thread that asks them
// (`isCompleted`: their end events), off the critical path.

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>
#include <typeinfo>
#include <vector>

namespace {

using Word = std::atomic<int64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

constexpr int64_t kUnderWay = 0, kEnded = 1, kFailed = 2, kUnseen = 3, kAwaited = 4;
constexpr int kDone = 512;      // Collectives of one communicator that may be in flight.
constexpr int kTable = 512;     // Process groups that are told apart; twice the slots at least.
constexpr int kPending = 1024;  // Works on a device that are asked for their end.
constexpr int64_t kNoSlot = 0xFFFF;

std::atomic<char*> g_ring{nullptr};
std::atomic<int> g_epoch{0};  // Grows when the process groups are destroyed: names begin anew.
std::atomic<int (*)()> g_before{nullptr};
std::atomic<bool> g_backward{false};
std::atomic<int64_t> g_blocked{0};
std::atomic<int64_t> g_lost{0};  // Collectives that found no slot or no place to be asked.
int g_new_comm = -1;             // eventfd: a communicator was seen for the first time.
pid_t g_main = 0;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

int64_t thread_id() {
  thread_local int64_t id = syscall(SYS_gettid);
  return id;
}

Word& word(char* ring, size_t index) { return reinterpret_cast<Word*>(ring)[index]; }
Word* span_words(char* ring, int64_t number) {
  return reinterpret_cast<Word*>(ring + SPANS_AT + (number % SPANS_MAX) * SPAN_BYTES);
}
Word* comm_words(char* ring, int64_t slot) {
  return reinterpret_cast<Word*>(ring + HEADER_BYTES + slot * COMM_BYTES);
}

// --- communicators -------------------------------------------------------------------------------

struct Comm {
  std::atomic<const void*> group{nullptr};
  int epoch = 0;
  bool p2p = false;
  int64_t slot = kNoSlot;
  std::string name;
  std::atomic<int64_t> seq{0};  // Where it has no slot.
  std::atomic<int64_t> done[kDone];
};

Comm g_comms[kTable];
std::mutex g_comms_mutex;

// Moves `ended` over every collective that has ended; buckets end in any order.
void advance(char* ring, Comm& comm, int64_t seq) {
  if (comm.slot == kNoSlot) return;
  Word* words = comm_words(ring, comm.slot);
  comm.done[seq % kDone].store(seq, std::memory_order_release);
  int64_t ended = words[C_ENDED].load(std::memory_order_acquire);
  if (words[C_STARTED].load(std::memory_order_relaxed) - ended >= kDone) {
    // Too many in flight for the bitmap: what is older is given up.
    words[C_ENDED].compare_exchange_strong(ended, seq - kDone / 2);
  }
  ended = words[C_ENDED].load(std::memory_order_acquire);
  while (comm.done[(ended + 1) % kDone].load(std::memory_order_acquire) == ended + 1) {
    if (words[C_ENDED].compare_exchange_weak(ended, ended + 1)) ended++;
  }
}

void write_slot(char* ring, int64_t slot, const std::string& name, int64_t size) {
  char* at = ring + HEADER_BYTES + slot * COMM_BYTES;
  word(ring, W_COMM_SEQ).fetch_add(1);
  memset(at, 0, COMM_BYTES);
  memcpy(at + COMM_TEXT_AT + 32, name.data(), std::min<size_t>(name.size(), 63));
  comm_words(ring, slot)[C_SIZE].store(size);
  word(ring, W_COMM_SEQ).fetch_add(1);
}

// Returns the slot of the same name from before the groups were destroyed, or the next free one.
int64_t find_slot(char* ring, const std::string& name, int epoch) {
  int64_t count = word(ring, W_NUM_COMMS).load();
  for (int64_t slot = 0; slot < count; slot++) {
    const char* text = ring + HEADER_BYTES + slot * COMM_BYTES + COMM_TEXT_AT + 32;
    if (name.compare(0, 63, text) == 0) return slot;
  }
  if (count >= COMMS_MAX) return kNoSlot;
  return count;
}

bool matches(const Comm& comm, const void* group, bool p2p, const std::string& name, int epoch) {
  return comm.group.load(std::memory_order_acquire) == group && comm.p2p == p2p &&
      comm.epoch == epoch && comm.name == name;
}

Comm* add_comm(char* ring, const c10d::ProcessGroup& group, bool p2p, size_t hash, int epoch) {
  std::lock_guard<std::mutex> guard(g_comms_mutex);
  const std::string& name = group.getGroupName();
  for (int probe = 0; probe < kTable; probe++) {
    Comm& comm = g_comms[(hash + probe) % kTable];
    const void* known = comm.group.load();
    if (known != nullptr && matches(comm, &group, p2p, name, epoch)) return &comm;
    if (known != nullptr) continue;
    comm.epoch = epoch;
    comm.p2p = p2p;
    comm.name = name;
    const std::string label = p2p ? name + P2P_SUFFIX : name;
    comm.slot = find_slot(ring, label, epoch);
    if (comm.slot != kNoSlot) {
      // Counts of two ranks' sends need not agree, so nobody may compare them: size 1.
      write_slot(ring, comm.slot, label, p2p ? 1 : group.getSize());
      if (comm.slot == word(ring, W_NUM_COMMS).load()) word(ring, W_NUM_COMMS).fetch_add(1);
    }
    comm.group.store(&group, std::memory_order_release);
    uint64_t one = 1;
    if (write(g_new_comm, &one, sizeof one) < 0) g_lost.fetch_add(0);
    return &comm;
  }
  return nullptr;
}

Comm* find_comm(char* ring, const c10d::ProcessGroup& group, bool p2p) {
  const int epoch = g_epoch.load(std::memory_order_acquire);
  const size_t hash = (reinterpret_cast<uintptr_t>(&group) >> 4) * 2 + p2p;
  for (int probe = 0; probe < kTable; probe++) {
    Comm& comm = g_comms[(hash + probe) % kTable];
    if (comm.group.load(std::memory_order_acquire) == nullptr) break;
    if (matches(comm, &group, p2p, group.getGroupName(), epoch)) return &comm;
  }
  return add_comm(ring, group, p2p, hash, epoch);
}

// --- spans ---------------------------------------------------------------------------------------

struct Span {
  Comm* comm;
  int64_t number, seq;
};

Span begin_span(char* ring, Comm& comm, int64_t kind, int64_t bytes) {
  const int64_t now = now_ns();
  Span span{&comm, 0, 0};
  if (comm.slot != kNoSlot) {
    Word* words = comm_words(ring, comm.slot);
    words[C_SINCE].store(now, std::memory_order_relaxed);  // Before the count that it dates.
    words[C_BYTES].store(bytes, std::memory_order_relaxed);
    words[C_KIND].store(kind, std::memory_order_relaxed);
    span.seq = words[C_STARTED].fetch_add(1, std::memory_order_acq_rel) + 1;
  } else {
    span.seq = comm.seq.fetch_add(1) + 1;
    g_lost.fetch_add(1, std::memory_order_relaxed);
  }
  span.number = word(ring, W_NUM_SPANS).fetch_add(1, std::memory_order_acq_rel);
  Word* words = span_words(ring, span.number);
  words[S_NUMBER].store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  words[S_START].store(now, std::memory_order_relaxed);
  words[S_END].store(0, std::memory_order_relaxed);
  words[S_WAIT].store(0, std::memory_order_relaxed);
  words[S_SEQ].store(span.seq, std::memory_order_relaxed);
  words[S_BYTES].store(bytes, std::memory_order_relaxed);
  words[S_KIND].store(kind | comm.slot << 16, std::memory_order_relaxed);
  words[S_STATE].store(kUnderWay | thread_id() << 32, std::memory_order_relaxed);
  words[S_NUMBER].store(span.number + 1, std::memory_order_release);
  word(ring, W_COMM_BEAT).store(now, std::memory_order_relaxed);
  return span;
}

// Harmless when repeated: the first to say so is right.
void end_span(const Span& span, int64_t state) {
  char* ring = g_ring.load(std::memory_order_acquire);
  if (ring == nullptr) return;
  const int64_t now = now_ns();
  Word* words = span_words(ring, span.number);
  if (words[S_NUMBER].load(std::memory_order_acquire) == span.number + 1) {
    int64_t old = words[S_STATE].load(std::memory_order_relaxed);
    if ((old & 0xFFFFFFFF) != kUnderWay && (old & 0xFFFFFFFF) != kAwaited) return;
    if (state != kUnseen) words[S_END].store(now, std::memory_order_relaxed);
    words[S_STATE].store((old & ~int64_t(0xFFFFFFFF)) | state, std::memory_order_release);
  }
  if (span.comm->epoch == g_epoch.load(std::memory_order_relaxed))
    advance(ring, *span.comm, span.seq);
  if (state != kUnseen) word(ring, W_COMM_BEAT).store(now, std::memory_order_relaxed);
}

// Says that a thread begins to wait for the end of a span, unless it has ended.
void note_awaited(const Span& span) {
  char* ring = g_ring.load(std::memory_order_acquire);
  if (ring == nullptr) return;
  Word* words = span_words(ring, span.number);
  if (words[S_NUMBER].load(std::memory_order_acquire) != span.number + 1) return;
  int64_t old = words[S_STATE].load(std::memory_order_relaxed);
  if ((old & 0xFFFFFFFF) == kUnderWay)
    words[S_STATE].compare_exchange_strong(old, old | kAwaited, std::memory_order_release);
}

// Adds to what a thread was blocked for. The training thread's, and in a backward pass that of
// the threads which work for it.
void note_blocked(const Span& span, int64_t ns) {
  char* ring = g_ring.load(std::memory_order_acquire);
  if (ring == nullptr) return;
  if (thread_id() == g_main || g_backward.load(std::memory_order_relaxed))
    g_blocked.fetch_add(ns, std::memory_order_relaxed);
  Word* words = span_words(ring, span.number);
  if (words[S_NUMBER].load(std::memory_order_acquire) == span.number + 1)
    words[S_WAIT].fetch_add(ns, std::memory_order_relaxed);
}

// --- ends ----------------------------------------------------------------------------------------

// Futures that will tell the end of a span. One wakes those who wait for it before it calls back,
// so on a busy machine the training thread may be past its wait while the span still has no end.
// Weak: nothing of the training lives longer for it.
struct Promise {
  int64_t number = -1;
  c10::weak_intrusive_ptr<c10::ivalue::Future> future{
      c10::intrusive_ptr<c10::ivalue::Future>()};
};
constexpr int kPromises = 256;
auto& g_promises = *new std::array<Promise, kPromises>;  // Threads outlive what a process destroys.
std::mutex g_promises_mutex;

void note_promise(const Span& span, const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  c10::weak_intrusive_ptr<c10::ivalue::Future> weak(future);
  std::lock_guard<std::mutex> guard(g_promises_mutex);
  Promise& promise = g_promises[span.number % kPromises];
  promise.number = span.number;
  std::swap(promise.future, weak);
}

// Whether the collective of span `number` has ended, though nothing has stamped that yet.
bool has_ended(int64_t number) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> guard(g_promises_mutex);
    Promise& promise = g_promises[number % kPromises];
    if (promise.number == number) future = promise.future.lock();
  }
  return future && future->completed();
}

// Stands before a Work that lives on the CPU: the same in all it answers, and stamps `wait`.
class StampedWork final : public c10d::Work {
 public:
  StampedWork(c10::intrusive_ptr<c10d::Work> inner, Span span, bool has_future)
      : Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        span_(span),
        has_future_(has_future) {}

  ~StampedWork() override {
    if (!has_future_) end_span(span_, kUnseen);  // Dropped without `wait`.
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const int64_t began = now_ns();
    note_awaited(span_);
    try {
      const bool done = inner_->wait(timeout);
      note_blocked(span_, now_ns() - began);
      end_span(span_, done ? kEnded : kFailed);
      return done;
    } catch (...) {
      note_blocked(span_, now_ns() - began);
      end_span(span_, kFailed);
      throw;
    }
  }

  bool isCompleted() override {
    const bool done = inner_->isCompleted();
    if (done && !has_future_) end_span(span_, kEnded);
    return done;
  }

  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return inner_->getFutureResult();
  }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  Span span_;
  bool has_future_;
};

// Works on a device, asked by a thread of their own whether they have ended. Bounded: where no
// place is free the span says that its end is not seen.
struct Place {
  std::atomic<int> state{0};  // 0 free, 1 being filled, 2 filled.
  c10::intrusive_ptr<c10d::Work> work;
  Span span{};
};
auto& g_places = *new std::array<Place, kPending>;
std::atomic<uint64_t> g_place{0};
std::once_flag g_asking;
// Before the interpreter goes down nobody may be in a work any more: what it holds may be Python's.
std::atomic<bool> g_asks{false}, g_over{false};

// Querying an event would break a CUDA graph being captured, unless this thread is relaxed.
void relax_capture_mode() {
  using Exchange = int (*)(int*);
  auto exchange =
      reinterpret_cast<Exchange>(dlsym(RTLD_DEFAULT, "cudaThreadExchangeStreamCaptureMode"));
  int relaxed = 2;
  if (exchange != nullptr) exchange(&relaxed);
}

void ask_works() {
  pthread_setname_np(pthread_self(), "perdure-ends");
  relax_capture_mode();
  while (!g_over.load()) {
    bool any = false;
    for (Place& place : g_places) {
      if (g_over.load()) break;
      if (place.state.load(std::memory_order_acquire) != 2) continue;
      any = true;
      int64_t state = kUnderWay;
      try {
        if (place.work->isCompleted()) state = place.work->isSuccess() ? kEnded : kFailed;
      } catch (...) {
        state = kUnseen;
      }
      if (state == kUnderWay) continue;
      end_span(place.span, state);
      place.work.reset();
      place.state.store(0, std::memory_order_release);
    }
    usleep(any ? 500 : 5000);
  }
  g_asks.store(false);
}

void ask_for_end(c10::intrusive_ptr<c10d::Work> work, const Span& span) {
  std::call_once(g_asking, [] {
    g_asks.store(true);
    std::thread(ask_works).detach();
  });
  for (int tries = 0; tries < 8 && !g_over.load(); tries++) {
    Place& place = g_places[g_place.fetch_add(1) % kPending];
    int expected = 0;
    if (!place.state.compare_exchange_strong(expected, 1)) continue;
    place.work = std::move(work);
    place.span = span;
    place.state.store(2, std::memory_order_release);
    return;
  }
  g_lost.fetch_add(1, std::memory_order_relaxed);
  end_span(span, kUnseen);
}

// Works written in Python keep their type, which a script may look at.
bool may_stand_before(const c10d::Work& work) {
  thread_local const std::type_info* last = nullptr;
  thread_local bool answer = false;
  const std::type_info& type = typeid(work);
  if (&type != last) {
    answer = strstr(type.name(), "PyWork") == nullptr &&
        strstr(type.name(), "FakeWork") == nullptr &&
        strstr(type.name(), "PythonCallbackWork") == nullptr;
    last = &type;
  }
  return answer;
}

// --- faults --------------------------------------------------------------------------------------

// No exception passes the dispatcher and autograd's threads unchanged, so what `before` raised is
// raised by the interpreter's main thread when it next runs Python. Looked up by name: this
// library is built without Python's headers.
std::atomic<void*> g_raised{nullptr};  // A PyObject, which its owner keeps alive.

int set_raised(void*) {
  using SetObject = void (*)(void*, void*);
  using Type = void* (*)(void*);
  auto set_object = reinterpret_cast<SetObject>(dlsym(RTLD_DEFAULT, "PyErr_SetObject"));
  auto type_of = reinterpret_cast<Type>(dlsym(RTLD_DEFAULT, "PyObject_Type"));
  void* raised = g_raised.exchange(nullptr);
  if (raised == nullptr || set_object == nullptr || type_of == nullptr) return 0;
  set_object(type_of(raised), raised);
  return -1;
}

void raise_in_main() {
  using AddPending = int (*)(int (*)(void*), void*);
  auto add = reinterpret_cast<AddPending>(dlsym(RTLD_DEFAULT, "Py_AddPendingCall"));
  if (add != nullptr) add(set_raised, nullptr);
}

// --- the kernel ----------------------------------------------------------------------------------

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const c10::FunctionSchema& schema, int64_t code, bool p2p) : code_(code), p2p_(p2p) {
    num_args_ = int(schema.arguments().size());
    num_returns_ = int(schema.returns().size());
    for (int i = 0; i < num_args_; i++) {
      const auto& argument = schema.arguments()[i];
      const std::string type = argument.type()->str();
      if (type.find("ProcessGroup") != std::string::npos) group_ = i;
      if (p2p && (argument.name() == "dst" || argument.name() == "src")) peer_ = i;
      const bool tensors = type == "Tensor" || type == "Tensor[]";
      const bool input = argument.name().rfind("input", 0) == 0;
      // A rank's input, where there is one: the output of a gather is empty on most ranks.
      if (tensors && (sized_ < 0 || (input && !sized_is_input_))) {
        sized_ = i;
        sized_is_input_ = input;
      }
    }
    for (int i = 0; i < num_returns_; i++)
      if (schema.returns()[i].type()->str().find("Work") != std::string::npos) work_ = i;
  }

  bool usable() const { return group_ >= 0; }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    char* ring = g_ring.load(std::memory_order_acquire);
    if (C10_LIKELY(ring != nullptr)) {
      if (auto before = g_before.load(std::memory_order_relaxed))
        if (before() != 0) raise_in_main();
      record(ring, op, keys, stack);
    } else {
      pass_on(op, keys, stack);
    }
  }

 private:
  static void pass_on(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    constexpr auto below =
        c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    op.redispatchBoxed(keys & below, stack);
  }

  void record(
      char* ring, const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const c10::IValue* args = stack->data() + stack->size() - num_args_;
    auto group = args[group_].toCustomClass<c10d::ProcessGroup>();
    Comm* comm = find_comm(ring, *group, p2p_);
    if (C10_UNLIKELY(comm == nullptr)) {
      g_lost.fetch_add(1, std::memory_order_relaxed);
      return pass_on(op, keys, stack);
    }
    int64_t bytes = 0, kind = code_;
    bool on_device = false;
    if (sized_ >= 0) measure(args[sized_], bytes, kind, on_device);
    if (peer_ >= 0) kind |= (args[peer_].toInt() + 1) << 32;
    // The host runs ahead of a device: its stamps are when this was enqueued. Before the span, so
    // that no reader sees the span without it.
    if (on_device && comm->slot != kNoSlot)
      comm_words(ring, comm->slot)[C_STAMPS].store(1, std::memory_order_release);
    const Span span = begin_span(ring, *comm, kind, bytes);
    try {
      pass_on(op, keys, stack);
    } catch (...) {
      end_span(span, kFailed);
      throw;
    }
    watch(span, on_device, stack);
  }

  static void measure(const c10::IValue& value, int64_t& bytes, int64_t& kind, bool& on_device) {
    const auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      bytes += int64_t(tensor.numel() * tensor.itemsize());
      kind = (kind & ~int64_t(0xFF00)) | (int64_t(tensor.scalar_type()) + 1) << 8;
      on_device = on_device || !tensor.is_cpu();
    };
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const c10::IValue& item : value.toListRef()) add(item.toTensor());
    }
  }

  void watch(const Span& span, bool on_device, c10::Stack* stack) {
    c10::intrusive_ptr<c10d::Work> work;
    c10::IValue* place = nullptr;
    if (work_ >= 0) {
      place = stack->data() + stack->size() - num_returns_ + work_;
      if (place->isObject()) work = place->toCustomClass<c10d::Work>();
    }
    if (!work) {
      // Nothing to wait for: on the CPU it has ended, and the call was the wait.
      char* ring = g_ring.load(std::memory_order_acquire);
      if (ring != nullptr && !on_device)
        note_blocked(span, now_ns() - span_words(ring, span.number)[S_START].load());
      end_span(span, on_device ? kUnseen : kEnded);
      return;
    }
    if (on_device) return ask_for_end(std::move(work), span);
    const bool has_future = call_back(*work, span);
    if (may_stand_before(*work)) {
      *place = c10::IValue(c10::intrusive_ptr<c10d::Work>(
          c10::make_intrusive<StampedWork>(std::move(work), span, has_future)));
    } else if (!has_future) {
      end_span(span, kUnseen);
    }
  }

  // Has the future of `work` tell its end; false where it has none. To find that out costs an
  // exception, so it is remembered by the type of the work.
  static bool call_back(c10d::Work& work, const Span& span) {
    thread_local const std::type_info* without[8] = {};
    const std::type_info* type = &typeid(work);
    for (const std::type_info* known : without)
      if (known == type) return false;
    try {
      auto future = work.getFuture();
      if (future) {
        note_promise(span, future);
        future->addCallback(
            [span](c10::ivalue::Future& f) { end_span(span, f.hasError() ? kFailed : kEnded); },
            /*uses_future=*/false);
        return true;
      }
    } catch (const std::exception&) {
    }
    for (const std::type_info*& place : without) {
      if (place == nullptr) {
        place = type;
        break;
      }
    }
    return false;
  }

  int64_t code_;
  bool p2p_;
  int num_args_ = 0, num_returns_ = 0, group_ = -1, sized_ = -1, peer_ = -1, work_ = -1;
  bool sized_is_input_ = false;
};

torch::Library* g_library = nullptr;

void leave_ring() { g_ring.store(nullptr, std::memory_order_release); }

}  // namespace

// --- for Python, through ctypes ------------------------------------------------------------------

#pragma GCC visibility push(default)
extern "C" {

// Registers the kernel for `count` operators of c10d; returns for how many it could. Only once.
int perdure_register(const char* const* names, const int64_t* codes, const char* p2p, int count) {
  if (g_library != nullptr) return -1;
  pthread_atfork(nullptr, nullptr, leave_ring);
  g_library = new torch::Library(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  int registered = 0;
  for (int i = 0; i < count; i++) {
    auto op = c10::Dispatcher::singleton().findSchema({std::string("c10d::") + names[i], ""});
    if (!op) continue;
    auto kernel = std::make_unique<Kernel>(op->schema(), codes[i], p2p[i] != 0);
    if (!kernel->usable()) continue;
    g_library->impl(
        names[i],
        torch::CppFunction::makeFromBoxedKernel(
            c10::BoxedKernel::makeFromFunctor(std::move(kernel))));
    registered++;
  }
  return registered;
}

// Maps the ring at `path` and records from now on; returns an eventfd that becomes readable when
// a communicator was seen for the first time, or -1 with errno.
int perdure_attach(const char* path) {
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  void* memory = mmap(nullptr, RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return -1;
  if (g_new_comm < 0) g_new_comm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  g_main = getpid();
  g_epoch.fetch_add(1);
  g_ring.store(static_cast<char*>(memory), std::memory_order_release);
  return g_new_comm;
}

// Records no more. The mapping stays: another thread may be in it.
void perdure_detach() { leave_ring(); }

// Asks no work any more for its end; those that have not ended are kept as they are. The process is
// about to go: returns when nobody is in a work, or after 0.1 s.
void perdure_stop_asking() {
  g_over.store(true);
  for (int tries = 0; tries < 200 && g_asks.load(); tries++) usleep(500);
}

// The process groups were destroyed; new ones may have the same names.
void perdure_forget() { g_epoch.fetch_add(1); }

// Writes which ranks are in the communicator of `slot`: `words` as in the slot's last part.
void perdure_set_ranks(int slot, const uint16_t* numbers, int count) {
  std::lock_guard<std::mutex> guard(g_comms_mutex);
  char* ring = g_ring.load(std::memory_order_acquire);
  if (ring == nullptr || slot < 0 || slot >= COMMS_MAX || count > COMM_RANKS_MAX + 1) return;
  word(ring, W_COMM_SEQ).fetch_add(1);
  memcpy(ring + HEADER_BYTES + slot * COMM_BYTES + COMM_RANKS_AT, numbers, size_t(count) * 2);
  word(ring, W_COMM_SEQ).fetch_add(1);
}

// Calls `before` in front of each collective, in the thread that enters it; nullptr: no more.
void perdure_set_before(int (*before)()) { g_before.store(before); }

// What the main thread raises when `before` has returned something else than 0.
void perdure_set_raised(void* exception) { g_raised.store(exception); }

// Nanoseconds for which the training was blocked in `wait` so far.
int64_t perdure_blocked_ns() { return g_blocked.load(std::memory_order_relaxed); }

// Collectives of which something could not be recorded.
int64_t perdure_lost() { return g_lost.load(std::memory_order_relaxed); }

void perdure_begin_backward() { g_backward.store(true, std::memory_order_relaxed); }

// Ends a backward pass that began at `began`. Returns how long its end was held up by
// collectives that nobody waited for by `wait`, as DDP's buckets, whose futures it waits for when
// all gradients are there: from the last of them entered until they had all ended. The share of
// each is written into its span.
int64_t perdure_end_backward(int64_t began) {
  g_backward.store(false, std::memory_order_relaxed);
  char* ring = g_ring.load(std::memory_order_acquire);
  if (ring == nullptr) return 0;
  const int64_t head = word(ring, W_NUM_SPANS).load(std::memory_order_acquire);
  const int64_t now = now_ns();
  int64_t first = head, last_start = 0;
  for (int64_t n = head - 1; n >= 0 && n > head - SPANS_MAX / 2; n--) {
    Word* words = span_words(ring, n);
    if (words[S_NUMBER].load(std::memory_order_acquire) != n + 1) break;
    const int64_t start = words[S_START].load(std::memory_order_relaxed);
    if (start < began) break;
    first = n;
    if (words[S_WAIT].load(std::memory_order_relaxed) == 0) last_start = std::max(last_start, start);
  }
  int64_t covered = last_start;
  for (int64_t n = first; n < head && last_start; n++) {
    Word* words = span_words(ring, n);
    int64_t end = std::min(words[S_END].load(std::memory_order_relaxed), now);
    if (end == 0 && has_ended(n)) end = now;
    if (words[S_WAIT].load(std::memory_order_relaxed) == 0 && end > covered) {
      words[S_WAIT].fetch_add(end - covered, std::memory_order_relaxed);
      covered = end;
    }
  }
  const int64_t held = covered - last_start;
  g_blocked.fetch_add(held, std::memory_order_relaxed);
  return held;
}

}  // extern "C"
#pragma GCC visibility pop
