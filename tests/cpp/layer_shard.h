// Steps of a layer on several devices, each with a random shard of the batch.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "op/sync_batch_norm.h"
#include "tensor.h"

namespace test {

using syncbn::Activation;
using syncbn::Device;
using syncbn::DType;
using syncbn::Function;
using syncbn::WriteMode;

struct Setting {
  Activation activation;
  bool from_output = false;  // backward reads y instead of x
  WriteMode dx_mode = WriteMode::kWrite;
  WriteMode y_mode = WriteMode::kWrite;
  bool keeps_x = false;  // one channel's gamma is so small that forward must keep a copy of x
  bool training = true;
  bool masked = false;  // the last row of each shard is padding
  int64_t channels = 5;
  WriteMode dgamma_mode = WriteMode::kAdd;

  syncbn::Options ToOptions(size_t devices) const {
    syncbn::Options options;
    options.num_devices = static_cast<int>(devices);
    options.timeout = 60;
    options.activation = activation;
    options.from_output = from_output;
    return options;
  }
};

constexpr int64_t kNotReconstructible = 2;  // the channel with the small gamma

// Parameters, data and results of one device.
struct Shard {
  Shard(DType dtype, int64_t rows, int seed, const Setting& setting)
      : shape{rows, setting.channels},
        x(dtype, rows * setting.channels * (setting.masked ? 1 : 7)),
        dy(dtype, x.size()),
        y(dtype, x.size()),
        dx(dtype, x.size()),
        gamma(dtype == DType::kFloat64 ? dtype : DType::kFloat32, setting.channels) {
    if (!setting.masked) shape.push_back(7);
    std::mt19937 generator(static_cast<unsigned>(seed));
    std::normal_distribution<double> normal(3, 2);
    for (int64_t i = 0; i < x.size(); ++i) {
      x.Set(i, normal(generator));
      dy.Set(i, normal(generator));
      dx.Set(i, 0.5);
      y.Set(i, 0.25);
    }
    for (int64_t c = 0; c < setting.channels; ++c) {
      const bool tiny = setting.keeps_x && c == kNotReconstructible;
      gamma.Set(c, tiny ? 1e-40 : 1 + 0.1 * static_cast<double>(c % 5));
      beta.Set(c, 0.2 * static_cast<double>(c % 5));
      mean.Set(c, 0.5);
      var.Set(c, 2);
      dgamma.Set(c, 1);
      valid_rows.Set(c, static_cast<double>(std::max<int64_t>(rows - 1, 0)));
    }
  }

  void Step(syncbn::SyncBatchNorm* layer, const Setting& setting) {
    BeginForward(layer, setting);
    layer->Finish();
    BeginBackward(layer, setting);
    layer->Finish();
  }

  void BeginForward(syncbn::SyncBatchNorm* layer, const Setting& setting) {
    layer->BeginForward(setting.training, {Data(x), Vector(gamma), Vector(beta), setting.y_mode,
                                           Data(y), Vector(mean), Vector(var), Vector(valid_rows)});
  }

  void BeginBackward(syncbn::SyncBatchNorm* layer, const Setting& setting) {
    layer->BeginBackward(Data(dy), Data(setting.from_output ? y : x),
                         {setting.dx_mode, setting.dgamma_mode, WriteMode::kWrite, Data(dx),
                          Vector(dgamma), Vector(dbeta)});
  }

  syncbn::Tensor Data(Tensor& t) const { return {t.data(), shape, t.dtype()}; }
  syncbn::Tensor Vector(Tensor& t) const { return {t.data(), {t.size()}, t.dtype()}; }

  std::vector<int64_t> shape;
  Tensor x, dy, y, dx;
  Tensor gamma, beta = gamma, mean = gamma, var = gamma, dgamma = gamma, dbeta = gamma;
  Tensor valid_rows = gamma;
};

inline std::shared_ptr<syncbn::Layer> MakeLayer(const Setting& setting, size_t devices,
                                                const std::string& name = "layer") {
  const auto layer = std::make_shared<syncbn::Layer>(name);
  layer->SetOptions(setting.ToOptions(devices));
  return layer;
}

// Makes two steps of a layer. Each shard has a device, a thread, and a backend from `make`.
inline std::vector<Shard> Train(DType dtype, const std::vector<int64_t>& rows,
                                const Setting& setting, const char* type,
                                const std::function<std::unique_ptr<syncbn::Backend>()>& make) {
  const auto shared = MakeLayer(setting, rows.size());
  std::vector<Shard> shards;
  for (size_t k = 0; k < rows.size(); ++k) {
    shards.emplace_back(dtype, rows[k], static_cast<int>(k), setting);
  }
  Parallel(static_cast<int>(rows.size()), [&](int k) {
    syncbn::SyncBatchNorm layer(shared, setting.masked, {type, k}, make());
    for (int step = 0; step < 2; ++step) shards[k].Step(&layer, setting);
  });
  return shards;
}

inline std::vector<Shard> TrainOnCpu(DType dtype, const std::vector<int64_t>& rows,
                                     const Setting& setting) {
  return Train(dtype, rows, setting, "cpu", syncbn::MakeCpuBackend);
}

inline void Compare(Tensor& result, Tensor& expected, double error, const std::string& name) {
  CHECK(result.GuardsAreIntact(), name);
  const DType dtype = result.dtype();
  const double eps = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  for (int64_t i = 0; i < result.size(); ++i) {
    // The tolerance allows one rounding of each of 400 terms below 100, and one of the result.
    CHECK_NEAR(result.Get(i), expected.Get(i),
               100 * 400 * eps + Ulp(dtype, expected.Get(i)) + error, name, " ",
               syncbn::Name(dtype));
  }
}

}  // namespace test
