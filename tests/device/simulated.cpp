// A second device, "sim", in the memory of the CPU. It computes with the kernels of the CPU, and refuses what GPUs
// refuse: operands on two devices, and a generator of another device. With sim_float64(false) it refuses float64,
// too, as Apple's MPS does.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>

namespace {

using namespace at;
using Ints = c10::SymIntArrayRef;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
const Device DEVICE(SIM, 0);
std::atomic<bool> float64{true};

// Memory: the CPU's.
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(SIM, &memory);

// Streams and events: one stream, in which everything is done at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream() { return Stream(Stream::DEFAULT, DEVICE); }
  DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: those of a generator of the CPU.
struct Random final : c10::GeneratorImpl {
  Generator own;
  explicit Random(Generator cpu)
      : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), own(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  Random* clone_impl() const override { return new Random(own.clone()); }
};

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }  // they override functions from torch 2.7 on
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static const Generator usual = make_generator<Random>(at::detail::createCPUGenerator());
    return usual;
  }
  Generator getNewGenerator(DeviceIndex) const override {
    return make_generator<Random>(at::detail::createCPUGenerator());
  }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) memcpy(data.get(), storage.data(), kept);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};
Hooks hooks;
[[maybe_unused]] const bool registered = (RegisterPrivateUse1HooksInterface(&hooks), true);

// Every operator without a kernel below: the CPU's, after the checks.
void check_tensor(const std::string& name, const std::string& argument, const Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || tensor.device().type() == SIM || tensor.dim() == 0, "sim: ", name,
              ": Expected all tensors to be on the same device, but argument ", argument, " is on ", tensor.device(),
              " with shape ", tensor.sizes());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const std::string& name = op.schema().name();
  const auto base = stack->size() - arguments.size();
  // Copies go between devices, and indices may lie on the CPU.
  const bool crosses = name.find("index") != std::string::npos || name.find("_copy") != std::string::npos;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[base + i];
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == SIM, "sim: ", name,
                  ": Expected a 'sim' device type for generator but found '", generator.device(), "'");
      value = static_cast<Random*>(generator.unsafeGetGeneratorImpl())->own;
    } else if (value.isTensor() && !crosses) {
      check_tensor(name, arguments[i].name(), value.toTensor());
    } else if (value.isTensorList() && !crosses) {
      for (const auto& tensor : value.toTensorVector()) check_tensor(name, arguments[i].name(), tensor);
    }
  }
  native::cpu_fallback(op, stack);
}

// Own kernels: memory, views, and what has no kernel to fall back on.
namespace kernel {

ScalarType allowed(std::optional<ScalarType> dtype) {
  const auto type = dtype_or_default(dtype);
  TORCH_CHECK_TYPE(float64 || (type != kDouble && type != kComplexDouble),
                   "sim: Cannot convert a sim Tensor to float64 dtype as it does not support float64");
  return type;
}

Tensor empty(Ints size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                               c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), allowed(dtype), format);
}

Tensor empty_strided(Ints size, Ints stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                       c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), allowed(dtype));
}

// The same memory, as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  auto* start = static_cast<char*>(tensor.storage().mutable_data());
  void* data = start ? start + tensor.storage_offset() * tensor.element_size() : nullptr;
  return from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(kCPU));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (from.device().type() == SIM) allowed(to.scalar_type());  // MPS converts before it copies
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Scalar local_scalar(const Tensor& tensor) { return on_cpu(tensor).item(); }

Tensor view(const Tensor& tensor, Ints size) { return native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor as_strided(const Tensor& tensor, Ints size, Ints stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor reshape_alias(const Tensor& tensor, Ints size, Ints stride) {
  return native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& tensor, Ints size, std::optional<MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t needed = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.element_size();
  if (tensor.storage().nbytes() < needed) hooks.resizePrivateUse1Bytes(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_part(Tensor& tensor, Storage source, c10::SymInt offset, Ints size, Ints stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto given = C10_AS_INTARRAYREF_SLOW(stride);
  const auto strides = stride.empty() ? c10::contiguous_strides(sizes) : c10::DimVector(given);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return tensor;
}

Tensor& set_whole(Tensor& tensor, Storage source) {
  const c10::SymInt length = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return set_part(tensor, std::move(source), 0, length, {});
}

Tensor back(const Tensor& tensor) { return tensor.defined() ? tensor.to(DEVICE) : tensor; }

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, Ints stride, Ints padding,
                   Ints dilation, bool transposed, Ints output_padding, c10::SymInt groups) {
  check_tensor("convolution", "weight", w);
  std::optional<Tensor> b;
  if (bias && bias->defined()) {
    check_tensor("convolution", "bias", *bias);
    b = on_cpu(*bias);
  }
  return back(convolution_symint(on_cpu(x), on_cpu(w), b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& w,
                                                        Ints stride, Ints padding, Ints dilation, bool transposed,
                                                        Ints output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  for (const auto& each : {grad, x, w}) check_tensor("convolution_backward", "input", each);
  const c10::SymInt outputs = transposed ? w.size(1) * groups.expect_int() : w.size(0);
  auto [dx, dw, db] = convolution_backward_symint(on_cpu(grad), on_cpu(x), on_cpu(w), Ints(outputs), stride, padding,
                                                  dilation, transposed, output_padding, groups, wanted);
  return {back(dx), back(dw), back(db)};
}

// Its schema does not say that the running statistics are written: the fallback would not copy them back.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const std::optional<Tensor>& w,
                                              const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
                                              const std::optional<Tensor>& variance, bool training, double momentum,
                                              double eps) {
  const auto own = [](const std::optional<Tensor>& given) {
    if (given && given->defined()) check_tensor("batch_norm", "operand", *given);
    return given ? std::optional<Tensor>(on_cpu(*given)) : given;
  };
  auto [y, saved_mean, saved_invstd] =
      native_batch_norm(on_cpu(x), own(w), own(bias), own(mean), own(variance), training, momentum, eps);
  return {back(y), back(saved_mean), back(saved_invstd)};
}

}  // namespace kernel
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", kernel::empty);
  m.impl("empty_strided", kernel::empty_strided);
  m.impl("_copy_from", kernel::copy_from);
  m.impl("_copy_from_and_resize", kernel::copy_from_and_resize);
  m.impl("_local_scalar_dense", kernel::local_scalar);
  m.impl("view", kernel::view);
  m.impl("as_strided", kernel::as_strided);
  m.impl("unfold", native::unfold);
  m.impl("_reshape_alias", kernel::reshape_alias);
  m.impl("resize_", kernel::resize);
  m.impl("set_.source_Storage_storage_offset", kernel::set_part);
  m.impl("set_.source_Storage", kernel::set_whole);
  m.impl("native_batch_norm", kernel::batch_norm);
  m.impl("convolution_overrideable", kernel::convolution);
  m.impl("convolution_backward_overrideable", kernel::convolution_backward);
}

// Autocast: the products in the lower precision, as on the CPU.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

extern "C" void sim_float64(bool has) { float64 = has; }
