// Devices for PyTorch's CPU build: "cuda:0", "cuda:1", ... with -DDEVICE=CUDA, and "mps" with -DDEVICE=MPS. Their
// tensors are ordinary tensors in host memory. Operations run the kernels of the CPU. simulated_cuda.py and
// simulated_mps.py compile and load this file, and document what is simulated.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <set>

namespace simulated {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using torch::jit::Stack;
constexpr auto TYPE = c10::DeviceType::DEVICE;
constexpr auto KEY = DispatchKey::DEVICE;

std::atomic<int> num_devices{1};
std::atomic<int64_t> max_tokens{0};  // of one embedding lookup; 0: no limit
std::set<std::string> operators;  // that have a kernel; empty: all
std::set<std::string> rejected_dtypes;
std::atomic<void (*)(const char*)> on_synchronization{nullptr};
thread_local DeviceIndex current = 0;

void synchronize(const std::string& operation) {
  if (auto report = on_synchronization.load()) report(operation.c_str());
}

Device with_index(Device device) { return device.has_index() ? device : Device(TYPE, current); }

bool is_on_device(const Tensor& tensor) { return tensor.device().type() == TYPE; }

at::ScalarType validate(std::optional<at::ScalarType> dtype) {
  const auto type = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(!rejected_dtypes.count(c10::toString(type)), "the simulated device rejects the dtype ", type);
  return type;
}

// --- Memory ---

c10::DataPtr wrap_storage(Storage host, DeviceIndex index) {  // the same memory, on a device
  void* data = host.mutable_data();
  auto* owner = new Storage(std::move(host));
  return {data, owner, [](void* context) { delete static_cast<Storage*>(context); }, Device(TYPE, index)};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    return {data, data, &c10::free_cpu, Device(TYPE, current)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator)

std::set<const void*> pinned;
std::mutex pinned_mutex;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* data) {
    { std::lock_guard<std::mutex> lock(pinned_mutex); pinned.erase(data); }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, &release, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
PinnedAllocator pinned_allocator;

// --- Devices, streams and events: all work is done immediately ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device device) const override {
    Device old(TYPE, current);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(TYPE, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "device error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, with_index(device)); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int = 0) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize("synchronize"); }
  void synchronizeEvent(void*) const override { synchronize("synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(DEVICE, Guard)

// --- Operations ---

using Transform = std::function<Tensor(const Tensor&)>;

// Return `value` with every defined tensor in it replaced by transform(tensor).
IValue map_tensors(const IValue& value, const Transform& transform) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(transform(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? transform(each) : each);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each && each->defined() ? std::optional<Tensor>(transform(*each)) : each);
    }
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
    c10::impl::GenericList list(value.toList().elementType());
    for (const IValue& inner : value.toListRef()) list.push_back(map_tensors(inner, transform));
    return list;
  }
  return value;
}

Tensor make_tensor(Storage storage, const Tensor& like, DispatchKey key) {
  if (key == KEY) validate(like.scalar_type());
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

// Tensors of one operation: pairs of the same storage on a device and on the host, and of tensors that were converted.
struct Conversion {
  std::vector<std::pair<Storage, Storage>> storages;
  std::vector<std::pair<Tensor, Tensor>> tensors;

  Tensor to_host(const Tensor& tensor) {
    if (!is_on_device(tensor)) return tensor;
    const auto& storage = tensor.storage();
    Storage host;
    for (auto& [device, own] : storages) if (device.is_alias_of(storage)) host = own;
    if (!host) {
      c10::DataPtr data(storage.mutable_data(), new Storage(storage),
          [](void* context) { delete static_cast<Storage*>(context); }, Device(c10::kCPU));
      host = Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
      storages.emplace_back(storage, host);
    }
    tensors.emplace_back(tensor, make_tensor(host, tensor, DispatchKey::CPU));
    return tensors.back().second;
  }

  Tensor to_device(const Tensor& host, DeviceIndex index) {
    for (auto& [device, own] : tensors) if (own.is_same(host)) return device;
    for (auto& [device, own] : storages) {
      if (own.is_alias_of(host.storage())) return make_tensor(device, host, KEY);
    }
    Storage device(Storage::use_byte_size_t(), host.storage().nbytes(), wrap_storage(host.storage(), index), &allocator, true);
    storages.emplace_back(device, host.storage());
    return make_tensor(device, host, KEY);
  }

  // Give tensors on a device the size that an operation gave them on the host, such as an argument `out`.
  void resize() {
    for (auto& [device, host] : tensors) {
      if (device.sizes() == host.sizes()) continue;
      auto* storage = device.storage().unsafeGetStorageImpl();
      if (host.storage().nbytes() > storage->nbytes()) {
        storage->set_data_ptr_noswap(wrap_storage(host.storage(), device.device().index()));
        storage->set_nbytes(host.storage().nbytes());
      }
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
};

// Run the operation on the host, with its arguments on the stack, and push the results on the device `index`.
void run_on_host(const OperatorHandle& op, Stack* stack, DeviceIndex index) {
  Conversion conversion;
  const auto count = op.schema().arguments().size();
  for (auto value = stack->end() - count; value != stack->end(); ++value) {
    if (value->isDevice() && value->toDevice().type() == TYPE) *value = IValue(Device(c10::kCPU));
    else *value = map_tensors(*value, [&](const Tensor& tensor) { return conversion.to_host(tensor); });
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  conversion.resize();
  for (auto value = stack->end() - op.schema().returns().size(); value != stack->end(); ++value) {
    *value = map_tensors(*value, [&](const Tensor& host) { return conversion.to_device(host, index); });
  }
}

const std::set<std::string> SYNCHRONIZING = {  // kernels of CUDA that read a value or a size from the device
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::equal",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};

void fallback(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto& name = op.schema().name();
  const auto inputs = torch::jit::last(*stack, arguments.size());
  TORCH_CHECK_NOT_IMPLEMENTED(operators.empty() || operators.count(c10::toString(op.operator_name())), "The operator ",
      op.operator_name(), " is not implemented for the device ", TYPE);
  if (name == "aten::record_stream") return torch::jit::drop(*stack, arguments.size());
  std::optional<Device> device;
  bool has_mask = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_index = arguments[i].name() == "indices" && name.find("index") != std::string::npos;
    map_tensors(inputs[i], [&](const Tensor& tensor) {
      if (is_index) has_mask |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      if (is_index && tensor.is_cpu()) synchronize("index on the host");
      else if (is_on_device(tensor) || tensor.dim()) {  // scalars on the host are allowed
        if (!device) device = tensor.device();
        TORCH_CHECK(tensor.device() == *device, "Expected all tensors to be on the same device, but found at least two ",
            "devices, ", *device, " and ", tensor.device(), "! (argument ", arguments[i].name(), " of ", name, ")");
      }
      return tensor;
    });
  }
  TORCH_CHECK(!device || device->type() == TYPE, "Expected all tensors to be on the same device, but found at least two ",
      "devices, cpu and ", Device(TYPE, current), "! (", name, ")");
  if (SYNCHRONIZING.count(name)) synchronize(name.substr(6));
  if (name == "aten::repeat_interleave" && inputs.back().isNone()) synchronize("repeat_interleave");
  if (has_mask && name == "aten::_index_put_impl_" && inputs[2].toTensor().numel() != 1) synchronize("boolean mask");
  if (name == "aten::index_select" && max_tokens) {
    TORCH_CHECK_WITH(OutOfMemoryError, inputs[2].toTensor().numel() <= max_tokens, "the device is out of memory. Tried to embed ",
        inputs[2].toTensor().numel(), " tokens. The simulated device has a limit of ", max_tokens.load(), ".");
  }
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && inputs[2].toBool()) {  // half to float: only on CUDA
    const auto first = stack->size() - arguments.size();
    (*stack)[first] = inputs[0].toTensor().to(at::kFloat);
    (*stack)[first + 2] = false;
  }
  run_on_host(op, stack, device ? device->index() : current);
}

void copy(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto inputs = torch::jit::last(*stack, 3);
  const Tensor &to = inputs[0].toTensor(), &from = inputs[1].toTensor();
  const bool is_transfer = to.device().type() != from.device().type() && from.numel();
  const auto& host = to.is_cpu() ? to : from;
  bool is_pinned;
  { std::lock_guard<std::mutex> lock(pinned_mutex); is_pinned = pinned.count(host.storage().data()); }
  if (is_transfer && !(inputs[2].toBool() && is_pinned)) synchronize(is_on_device(to) ? "copy to device" : "copy to host");
  run_on_host(op, stack, is_on_device(to) ? to.device().index() : from.device().index());
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device.value_or(Device(TYPE))));
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(KEY), validate(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(with_index(device.value_or(Device(TYPE))));
  return at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(KEY), validate(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return self.set_(Storage(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {});
}

// In the CPU build, the choice of an attention kernel lacks a case for MPS.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto outputs = at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, enable_gqa);
  return std::get<0>(outputs);
}

TORCH_LIBRARY_IMPL(aten, MPS, m) { m.impl("scaled_dot_product_attention", TORCH_FN(attend)); }
TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", TORCH_FN(attend)); }

TORCH_LIBRARY(simulated_device, m) {
  m.def("configure(int devices, int max_tokens, int callback) -> ()", [](int64_t count, int64_t tokens, int64_t callback) {
    num_devices = count, max_tokens = tokens;
    on_synchronization = reinterpret_cast<void (*)(const char*)>(callback);
  });
  m.def("restrict(str[] dtypes, str[] kernels) -> ()", [](std::vector<std::string> dtypes, std::vector<std::string> kernels) {
    rejected_dtypes = {dtypes.begin(), dtypes.end()}, operators = {kernels.begin(), kernels.end()};
  });
  m.def("get_device() -> int", []() { return int64_t(current); });
  m.def("set_device(int device) -> ()", [](int64_t index) { Guard().setDevice(Device(TYPE, index)); });
}

TORCH_LIBRARY_IMPL(_, DEVICE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, DEVICE, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

}  // namespace simulated

namespace at {

// Hooks of CUDA and of MPS. torch finds the classes by their names.
template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated::num_devices; }
  DeviceIndex getCurrentDevice() const override { return simulated::current; }
  void setCurrentDevice(DeviceIndex i) const override { simulated::Guard().setDevice(Device(simulated::TYPE, i)); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    return simulated::Guard().exchangeDevice(Device(simulated::TYPE, i)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
};

struct CUDAHooks final : Hooks<CUDAHooksInterface> {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return isAvailable(); }
  int getNumGPUs() const override { return deviceCount(); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(simulated::pinned_mutex);
    return simulated::pinned.count(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &simulated::allocator; }
  void deviceSynchronize(DeviceIndex) const override { simulated::synchronize("synchronize"); }
};

struct MPSHooks final : Hooks<MPSHooksInterface> {
  bool hasMPS() const override { return isAvailable(); }
  bool isOnMacOSorNewer(unsigned major, unsigned) const override { return major <= 14; }
  Allocator* getMPSDeviceAllocator() const override { return &simulated::allocator; }
  void deviceSynchronize() const override { simulated::synchronize("synchronize"); }
  void emptyCache() const override {}
};

#define REGISTER_HOOKS(device) _REGISTER_HOOKS(device)
#define _REGISTER_HOOKS(device) \
  using at::device##HooksRegistry; \
  using at::Registerer##device##HooksRegistry; \
  REGISTER_##device##_HOOKS(device##Hooks)
REGISTER_HOOKS(DEVICE)

}  // namespace at
