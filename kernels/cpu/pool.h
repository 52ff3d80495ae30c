// Threads that wait for the next step, and what they share within one. A step is a chain of some hundred short phases, too
// short to be handed out one by one.
#pragma once
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mla {

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for a moment, since the others are about to come; then lets whoever else wants the core have it. (Where the others wait
// for a core themselves, to go on asking would keep them from it.)
template <class Condition>
inline void await(Condition done) {
  for (int turn = 0; !done(); turn++) {
    if (turn < 4000)
      breathe();
    else if (turn < 4010)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// One of the short pieces of work that a step is made of: tasks that whoever is there takes in turn. Nobody waits for a thread
// that has taken none, so one that has to wait for a core itself holds nobody up: it finds the phase done when it comes.
class Phase {
 public:
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }
  // Returns once work(i) is done for every i < count; all threads must give the same count.
  template <class Work>
  void share(int count, Work work) {
    int mine = 0;
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count; mine++) work(i);
    if (mine) done_.fetch_add(mine, std::memory_order_release);
    await([&] { return done_.load(std::memory_order_acquire) >= count; });
  }

 private:
  alignas(64) std::atomic<int> next_{0};
  std::atomic<int> done_{0};
};

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> held(mutex_);
      ending_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  // Runs work(0) here and work(i), i < n, on threads that come before it returns; all have returned when this does. Work is to
  // be shared so that any of them can do all of it.
  void run(int n, const std::function<void(int)>& work) {
    if (n == 1) return work(0);
    grow(n - 1);
    {
      std::lock_guard<std::mutex> held(mutex_);
      work_ = &work;
      wanted_ = n - 1;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    work(0);
    {
      std::lock_guard<std::mutex> held(mutex_);
      work_ = nullptr;
    }
    await([&] { return helping_.load(std::memory_order_acquire) == 0; });
  }

 private:
  void grow(int n) {
    while ((int)threads_.size() < n) {
      int mine = (int)threads_.size();
      long seen = generation_.load();
      threads_.emplace_back([this, mine, seen] { serve(mine, seen); });
    }
  }
  void serve(int mine, long seen) {
    for (;;) {
      // The next step is a moment away while text is being written.
      for (int turn = 0; turn < 2000 && generation_.load(std::memory_order_acquire) == seen; turn++) breathe();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> held(mutex_);
        wake_.wait(held, [&] { return generation_.load() != seen; });
      }
      const std::function<void(int)>* work;
      {
        std::lock_guard<std::mutex> held(mutex_);
        if (ending_) return;
        seen = generation_.load();
        work = mine < wanted_ ? work_ : nullptr;  // null, too, where all was done before this thread came
        if (work) helping_.fetch_add(1);
      }
      if (!work) continue;
      (*work)(mine + 1);
      helping_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<long> generation_{0};
  std::atomic<int> helping_{0};
  const std::function<void(int)>* work_ = nullptr;
  int wanted_ = 0;
  bool ending_ = false;
};

// Numbers to work with: aligned; grows, and keeps what it has.
template <class T>
class Room {
 public:
  ~Room() { free(data); }
  T* room(int64_t wanted) {
    if (wanted > size_) {
      free(data);
      size_ = wanted;
      data = (T*)aligned_alloc(64, (size_ * sizeof(T) + 63) / 64 * 64);
    }
    return data;
  }
  T* data = nullptr;

 private:
  int64_t size_ = 0;
};

// The one that this process has. A child has none of its parent's threads, and gets its own; the parent's, whose threads are not
// here to be ended, stays as it is.
template <class T>
T& of_this_process() {
  static T* held = nullptr;
  static pid_t owner = 0;
  if (owner != getpid()) {
    held = new T();
    owner = getpid();
  }
  return *held;
}

}  // namespace mla
