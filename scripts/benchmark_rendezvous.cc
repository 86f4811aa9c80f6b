// Times the meeting of a layer's devices in one process: threads, kilobytes, then seconds a round.
// Who uses it: benchmark_exchange.py, which compiles it. Rounds follow each other at once, so a
// round's time is the one from the first thread's arrival to its departure.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "collective/group.h"
#include "op/reducers.h"

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]), warm_up = rounds / 10;
  for (int threads : {2, 4, 8}) {
    for (int kilobytes : {1, 4, 16}) {
      syncbn::Group group("layer");
      std::vector<double> seconds;
      std::vector<std::thread> running;
      for (int id = 0; id < threads; ++id) {
        running.emplace_back([&, id] {
          const syncbn::Device device{"cpu", id};
          for (int round = 0; round < warm_up + rounds; ++round) {
            const auto ticket = group.BeginForward(device, threads);
            syncbn::Arrival arrival{"", "", syncbn::Payload(kilobytes * 128, 1.0), {}};
            const auto begin = std::chrono::steady_clock::now();
            const auto sum =
                group.AllReduce(ticket, {"forward", ticket.number, 0}, device, std::move(arrival),
                                {static_cast<size_t>(threads), {}, 60, {}}, syncbn::Sum);
            const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
            if (sum->at(0) != threads) std::abort();
            if (id == 0 && round >= warm_up) seconds.push_back(taken.count());
          }
        });
      }
      for (auto& thread : running) thread.join();
      std::printf("%d %d", threads, kilobytes);
      for (double value : seconds) std::printf(" %.9f", value);
      std::printf("\n");
    }
  }
}
