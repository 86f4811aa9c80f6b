// The texts that a user reads when a rendezvous of devices fails. Each function returns the whole
// message; none throws.
#pragma once
#include <set>
#include <string>

#include "collective/devices/rendezvous.h"

namespace syncbn {

// "SyncBatchNorm 'norm0', forward"
std::string Title(const std::string& layer, const std::string& phase);

// `known` are devices that could have arrived; `where` is what WhereProgramStands returns.
std::string TimeoutReport(const std::string& title, const Rendezvous& rendezvous, size_t size,
                          const std::set<Device>& known, double seconds, const std::string& where);

// For two devices whose signatures differ; without the title.
std::string DisagreementReport(const std::pair<const Device, Arrival>& a,
                               const std::pair<const Device, Arrival>& b);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// For a device that is not one of the participants.
std::string NoParticipantReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants);

// For a device that arrives twice at one rendezvous; without the title.
std::string TwiceReport(const Device& device);

// For a device that calls a layer after the layer has failed.
std::string EarlierFailureReport(const std::string& layer, const std::string& phase,
                                 const Device& device, const std::string& failure);

// The failure of a call that belongs to a forward call before a reset.
constexpr char kWasReset[] =
    "the layer was reset by gluon_syncbn.recover() after the forward call that this call belongs "
    "to.";

}  // namespace syncbn
