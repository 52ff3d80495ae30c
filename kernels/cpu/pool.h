// Threads that wait for the next step, and barriers within one. A step is a chain of some hundred short phases, too short to
// be handed out one by one.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
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

class Barrier {
 public:
  void open(int threads) { threads_ = threads; }
  void wait() {
    if (threads_ == 1) return;
    int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
    } else {
      await([&] { return turn_.load(std::memory_order_acquire) != turn; });
    }
  }

 private:
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> turn_{0};
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
  // Runs work(i) for i < n, the caller among them, and returns once all are done.
  void run(int n, const std::function<void(int)>& work) {
    if (n == 1) return work(0);
    grow(n - 1);
    {
      std::lock_guard<std::mutex> held(mutex_);
      work_ = &work;
      wanted_ = n - 1;
      running_.store((int)threads_.size());
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    work(0);
    await([&] { return running_.load(std::memory_order_acquire) == 0; });
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
      int wanted;
      {
        std::lock_guard<std::mutex> held(mutex_);
        if (ending_) return;
        seen = generation_.load();
        work = work_;
        wanted = wanted_;
      }
      if (mine < wanted) (*work)(mine + 1);
      running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<long> generation_{0};
  std::atomic<int> running_{0};
  const std::function<void(int)>* work_ = nullptr;
  int wanted_ = 0;
  bool ending_ = false;
};

}  // namespace mla
