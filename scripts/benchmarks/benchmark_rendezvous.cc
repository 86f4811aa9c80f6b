// Times the rendezvous of a layer's devices in one process; takes the threads and kilobytes, and
// prints the seconds of each.
// Who uses it: benchmark_exchange.py, which compiles it. The time of one is from the last thread's
// arrival to the last departure: the rendezvous adds it to the work of the slowest.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "collective/group.h"

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]), warm_up = rounds / 10;
  for (int threads : {2, 4, 8}) {
    for (int kilobytes : {1, 4, 16}) {
      syncbn::Group group("layer");
      using Times = std::vector<std::chrono::steady_clock::time_point>;
      std::vector<Times> arrivals(threads), departures(threads);
      std::vector<std::thread> running;
      for (int id = 0; id < threads; ++id) {
        running.emplace_back([&, id] {
          const syncbn::Device device{"cpu", id};
          for (int round = 0; round < warm_up + rounds; ++round) {
            const auto ticket = group.BeginForward(device, threads);
            const std::vector<double> numbers(kilobytes * 128, 1.0);
            syncbn::Arrival arrival{"", "", syncbn::ToBytes(numbers)};
            arrivals[id].push_back(std::chrono::steady_clock::now());
            const auto sum = group.AllReduce(
                ticket, {"forward", ticket.number, 0}, device, std::move(arrival),
                {static_cast<size_t>(threads), {}, 60, "sum_float64", {}});
            departures[id].push_back(std::chrono::steady_clock::now());
            if (syncbn::FromBytes<double>(*sum)[0] != threads) std::abort();
          }
        });
      }
      for (auto& thread : running) thread.join();
      std::printf("%d %d", threads, kilobytes);
      for (int round = warm_up; round < warm_up + rounds; ++round) {
        auto arrival = arrivals[0][round], departure = departures[0][round];
        for (int id = 1; id < threads; ++id) {
          arrival = std::max(arrival, arrivals[id][round]);
          departure = std::max(departure, departures[id][round]);
        }
        std::printf(" %.9f", std::chrono::duration<double>(departure - arrival).count());
      }
      std::printf("\n");
    }
  }
}
